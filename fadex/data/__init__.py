"""Images and text by name, batches from a key, a classifier that judges generated digits.

Nothing here downloads anything, and importing this package imports none of scikit-learn,
Pillow or tensorflow-datasets: each is loaded by the call that needs it.
"""

from fadex.data.batching import batch_indices
from fadex.data.classifier import digit_classifier
from fadex.data.images import ImageSet, load_images
from fadex.data.text import (
    TaggedCorpus,
    TaggedTokens,
    TextCorpus,
    decode_text,
    encode_text,
    random_windows,
    spaced_windows,
    tagged_corpus,
    text_corpus,
)

__all__ = [
    "ImageSet",
    "TaggedCorpus",
    "TaggedTokens",
    "TextCorpus",
    "batch_indices",
    "decode_text",
    "digit_classifier",
    "encode_text",
    "load_images",
    "random_windows",
    "spaced_windows",
    "tagged_corpus",
    "text_corpus",
]
