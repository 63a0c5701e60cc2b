"""Images by name, batch order from a key, and a classifier that judges generated digits.

Nothing here downloads anything, and importing this package imports none of scikit-learn,
Pillow or tensorflow-datasets: each is loaded by the call that needs it.
"""

from fadex.data.batching import batch_indices
from fadex.data.classifier import digit_classifier
from fadex.data.images import ImageSet, load_images

__all__ = ["ImageSet", "batch_indices", "digit_classifier", "load_images"]
