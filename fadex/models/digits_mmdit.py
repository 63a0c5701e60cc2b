r"""The digits MMDiT: 2 double and 2 single blocks, three text tokens; ships with the package.

A text is ``("digit", name, style)``: ``"digit", "seven", "bold"``. The style is the weight of
the stroke: which third an image's mean ink falls in, among the training images of its digit, so
that all 30 texts are equally frequent. The null text, for classifier-free guidance, is
``("null", "null", "null")``.

A frozen table of random numbers stands in for the text encoder: each word has a vector of
independent uniform features of mean 0 and variance 1, the same on every machine. The pooled
vector is the mean of the three. So the model reads a condition of FLUX's form, and its text
stream has work to do, but no language is understood here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.core.checks import check_int, check_shape
from fadex.core.denoiser import Denoiser, Params, from_nnx
from fadex.models.mmdit import MMDiT, MMDiTConfig

TEXT_WIDTH = 32

DIGITS_MMDIT_CONFIG = MMDiTConfig(
    patch_size=2,
    in_channels=4,
    double_depth=2,
    single_depth=2,
    width=64,
    num_heads=4,
    text_width=TEXT_WIDTH,
    pooled_width=TEXT_WIDTH,
    rope_axes=(4, 6, 6),
    scan_layers=True,  # compiles once for the blocks of a kind
)

STYLES = ("thin", "medium", "bold")
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_WORDS = ("null", "digit", *_NAMES, *STYLES)
NULL_TEXT = len(_NAMES) * len(STYLES)  # the id of the null text, behind those of the others

Text = dict[str, jax.Array]


@functools.lru_cache(maxsize=1)
def _text_tables() -> tuple[np.ndarray, np.ndarray]:
    """Token features ``[31, 3, W]`` and pooled ones ``[31, W]`` of all texts, the null text last.

    Raw bits of a counter-based generator: NumPy promises these, not its distributions, to stay.
    """
    bits = np.random.Philox(key=20240611).random_raw(len(_WORDS) * TEXT_WIDTH)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    vectors = (np.sqrt(12.0) * (uniform - 0.5)).reshape(len(_WORDS), TEXT_WIDTH)
    word = {name: vectors[i] for i, name in enumerate(_WORDS)}
    texts = [(word["digit"], word[name], word[style]) for name in _NAMES for style in STYLES]
    tokens = np.asarray([*texts, (word["null"],) * 3]).astype(np.float32)
    return tokens, tokens.mean(1)


def digits_text_ids(labels: Any, styles: Any) -> jax.Array:
    """One integer for each text, ``3 * label + style``; :data:`NULL_TEXT` is the null text.

    Args:
      labels: digits, int ``[B]`` in 0..9; styles: int ``[B]`` in 0..2, as in :data:`STYLES`.

    Raises:
      ValueError: shapes that differ, or concrete values outside their range.
    """
    labels, styles = jnp.asarray(labels), jnp.asarray(styles)
    check_shape("styles", styles, labels.shape)
    for name, values, count in (("labels", labels, 10), ("styles", styles, len(STYLES))):
        concrete = not isinstance(values, jax.core.Tracer)
        if concrete and values.size and not (0 <= values.min() and values.max() < count):
            raise ValueError(f"{name}: must lie in [0, {count}), got {np.unique(values)}")
    return labels * len(STYLES) + styles


def digits_text(labels: Any, styles: Any) -> Text:
    """The condition for digits in given styles: ``{"txt": [B, 3, 32], "pooled": [B, 32]}``.

    Args:
      labels, styles: as in :func:`digits_text_ids`.

    Example:
      >>> from fadex.models import digits_text
      >>> digits_text([7, 7], [0, 2])["txt"].shape  # "digit seven thin", "digit seven bold"
      (2, 3, 32)
    """
    return _text_of(digits_text_ids(labels, styles))


def digits_null_text(count: int) -> Text:
    """``count`` times the null text, the ``null_cond`` of classifier-free guidance."""
    return _text_of(jnp.full((check_int("count", count, minimum=1),), NULL_TEXT))


def _text_of(ids: jax.Array) -> Text:
    tokens, pooled = _text_tables()
    return {"txt": jnp.asarray(tokens)[ids], "pooled": jnp.asarray(pooled)[ids]}


def digits_text_batch(count: int) -> tuple[Text, Text, jax.Array]:
    """``(cond, null_cond, labels)`` of ``count`` samples: digits in turn, styles by tens.

    What a comparison needs beside noise of shape ``(count, 8, 8, 1)``
    (:data:`~fadex.models.DIGITS_SHAPE`).

    Example:
      >>> from fadex.models import digits_text_batch
      >>> cond, null_cond, labels = digits_text_batch(12)
      >>> labels.tolist()
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    """
    index = jnp.arange(check_int("count", count, minimum=1), dtype=jnp.int32)
    labels, styles = index % 10, index // 10 % len(STYLES)
    return digits_text(labels, styles), digits_null_text(count), labels


def stroke_styles(images: Any, labels: Any) -> np.ndarray:
    """Style of each image: the third that its mean ink falls in among the images of its label.

    Args:
      images: ``[M, ...]``; more ink is a larger value. labels: int ``[M]``.

    Returns:
      int32 ``[M]``: 0 thin, 1 medium, 2 bold; equal ink is ranked in the order of the images.
    """
    labels = np.asarray(labels)
    ink = np.asarray(images, np.float64).reshape(len(labels), -1).mean(1)
    styles = np.zeros(len(labels), np.int32)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rank = np.argsort(np.argsort(ink[members], kind="stable"))
        styles[members] = rank * len(STYLES) // len(members)
    return styles


@dataclasses.dataclass(frozen=True)
class _ReadsIds:
    """``apply`` of a model of texts, as a function of their ids; equal when ``apply`` is."""

    apply: Callable[..., jax.Array]

    def __call__(self, params: Params, x: jax.Array, t: jax.Array, ids: jax.Array) -> jax.Array:
        return self.apply(params, x, t, _text_of(ids))


def digits_text_denoiser(denoiser: Denoiser) -> Denoiser:
    """The denoiser conditioned on text ids in place of texts.

    :func:`fadex.sampling.train_flow` can train it like a class-conditional model, with
    ``labels=digits_text_ids(...)`` and ``null_label=NULL_TEXT``.
    """
    return Denoiser(_ReadsIds(denoiser.apply))


def digits_mmdit(seed: int = 0, **overrides: Any) -> MMDiT:
    """A freshly initialised digits MMDiT (:data:`DIGITS_MMDIT_CONFIG`, fields overridden)."""
    return MMDiT(dataclasses.replace(DIGITS_MMDIT_CONFIG, **overrides), rngs=nnx.Rngs(seed))


def shipped_mmdit_checkpoint() -> Path:
    """Folder of the trained weights inside the installed package."""
    return Path(str(resources.files("fadex") / "assets" / "digits_mmdit"))


def load_digits_mmdit(path: str | Path | None = None) -> tuple[Denoiser, Params]:
    """The trained digits MMDiT as ``(denoiser, params)``.

    Args:
      path: a checkpoint folder written by :func:`save_digits_mmdit`; the shipped one by default.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: the checkpoint is damaged or holds another model.

    Example:
      >>> import jax
      >>> from fadex.models import DIGITS_SHAPE, digits_text_batch, load_digits_mmdit
      >>> denoiser, params = load_digits_mmdit()
      >>> cond, null_cond, labels = digits_text_batch(2)
      >>> x = jax.random.normal(jax.random.key(0), (2, *DIGITS_SHAPE))
      >>> jax.eval_shape(denoiser.apply, params, x, 1.0, cond).shape
      (2, 8, 8, 1)
    """
    from fadex.core import checkpoint

    path = shipped_mmdit_checkpoint() if path is None else Path(path)
    if not checkpoint.exists(path):
        raise FileNotFoundError(f"path: no checkpoint at {path}")
    denoiser, params = from_nnx(nnx.eval_shape(digits_mmdit))  # shapes only, nothing is drawn
    pure = checkpoint.restore(path, target=nnx.to_pure_dict(params))
    nnx.replace_by_pure_dict(params, pure)
    return denoiser, params


def save_digits_mmdit(
    path: str | Path, params: Params, *, overwrite: bool = False, **metadata: Any
) -> Path:
    """Write weights as a pure dict of arrays; the inverse of :func:`load_digits_mmdit`.

    Args:
      path: the checkpoint folder to create.
      params: weights of :func:`digits_mmdit`.
      overwrite: replace a checkpoint that is at ``path``.
      metadata: anything that JSON can hold, kept in the checkpoint's manifest.

    Raises:
      FileExistsError: ``path`` exists and ``overwrite`` is false, or is not a checkpoint.
    """
    from fadex.core import checkpoint

    return checkpoint.save(
        path, nnx.to_pure_dict(params), metadata=metadata or None, overwrite=overwrite
    )
