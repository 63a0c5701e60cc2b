"""Which parameter gets which norm: by rules on paths, or by Muon's dimension numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from optax import MaskedNode
from optax.contrib import MuonDimensionNumbers

from fadex.core.checks import check_real
from fadex.core.pytree import path_str
from fadex.optim.norms import NormSpec, matrix_view
from fadex.optim.product_norms import broadcast_specs

__all__ = ["assign_norms", "weight_dimension_numbers"]

Rule = tuple[str | re.Pattern, NormSpec]

_HEAD = re.compile(r"(^|[/_.])(lm_head|head|logits|classifier|unembed|output_layer)([/_.]|$)", re.I)
_EMBED = re.compile(r"(?<!patch_)(?<!patch)(?<!un)embed|token_table|wte|wpe", re.I)
# Flax's attention: query, key, value (d, heads, d_head) and out (heads, d_head, d).
_SPLIT_HEADS = re.compile(r"(^|/)(query|key|value|qkv)/kernel$", re.I)
_JOIN_HEADS = re.compile(r"(^|/)out/kernel$", re.I)
_CONV = re.compile(r"conv", re.I)
_VECTOR = re.compile(r"(^|/)(bias|scale|b|g|gamma|beta)$", re.I)


def _natural(path: str) -> list[Any]:
    """A key that puts ``layers/10`` after ``layers/2``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", path)]


def _leaves(params: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path_str(path), tuple(np.shape(leaf)))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


def assign_norms(
    params: Any,
    rules: Sequence[Rule] | None = None,
    *,
    dims: Any = None,
    radius: float = 1.0,
    output_radius: float | None = None,
    vector_radius: float | None = None,
    **options: Any,
) -> Any:
    r"""A ``NormSpec`` for every parameter.

    Without rules, by path and shape (the assignment of Scion, arXiv 2502.07529):

    * no or one axis, or a name such as ``bias`` or ``scale``: ``rms``;
    * the head (``head``, ``lm_head``, ``logits``, ``unembed``, ``classifier``): ``linf`` with
      scale 1/K;
    * a name with ``embed`` (``patch_embed`` is no table): ``per_input``, each token's row on its
      own;
    * Flax's attention kernels ``query``, ``key``, ``value`` (d, heads, d_head) and ``out``
      (heads, d_head, d), stacked or not: ``spectral`` with the heads' axes joined;
    * a name with ``conv``, or four axes and more: ``spectral_conv``;
    * any other matrix: ``spectral``, the first one with scale max(1, √(N/K)) when nothing is
      embedded; with three axes the leading one counts as stacked layers.

    Where nothing is called a head, the last of two or more matrices, in natural order of paths
    (``dense_2`` before ``dense_10``), is taken for it, and the first for the input: give rules when
    your names sort otherwise. Under ``optax.masked`` and ``optax.partition`` only a part of the
    parameters is seen, and nothing is taken for a head but by name.

    Args:
      params: a parameter tree (arrays or ``jax.ShapeDtypeStruct``).
      rules: ``(pattern, NormSpec)`` pairs in place of the defaults; the first pattern that
        ``re.search`` finds in the leaf's path (``"layers/0/kernel"``) wins. ``(".*", spec)``
        last catches the rest.
      dims: as Muon's ``muon_weight_dimension_numbers``: a tree with a ``MuonDimensionNumbers``
        or ``None`` for each leaf, or a function of ``params`` that returns it. Leaves that have
        one get ``spectral`` on these axes with scale max(1, √(N/K)), all others what the defaults
        say, with ``linf`` (scale 1/K) for ``spectral``, unless ``rules`` name them.
      radius: ρ of matrices and embeddings. Published for a GPT-2-sized model: 50.
      output_radius: ρ of the head; default 10 ``radius``. Published: 3000.
      vector_radius: ρ of biases and scales; default ``radius``.
      **options: fields of ``NormSpec`` (``steps``, ``coefficients``, ``method``) for the
        spectral norms that the defaults choose.

    Returns:
      a tree of ``NormSpec`` with the structure of ``params``.

    Raises:
      ValueError: a path that no rule matches, or a norm that does not fit the leaf's shape.

    >>> import jax.numpy as jnp
    >>> params = {"in": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)},
    ...           "head": {"kernel": jnp.ones((8, 3))}}
    >>> specs = assign_norms(params)
    >>> specs["in"]["kernel"].name, specs["in"]["bias"].name, specs["head"]["kernel"].name
    ('spectral', 'rms', 'linf')
    """
    check_real("radius", radius, minimum=0.0, exclusive=True)
    output_radius = 10 * radius if output_radius is None else output_radius
    vector_radius = radius if vector_radius is None else vector_radius
    dims = dims(params) if callable(dims) else dims
    choose = _default(params, radius, output_radius, vector_radius, options)
    if dims is not None:
        choose = _by_dims(params, dims, radius, choose, options)
    compiled = None if rules is None else [(re.compile(p), spec) for p, spec in rules]

    def one(key_path: tuple, leaf: Any) -> NormSpec:
        path, shape = path_str(key_path), tuple(np.shape(leaf))
        spec = next((s for pattern, s in compiled or () if pattern.search(path)), None)
        if spec is None:
            if compiled is not None and dims is None:
                patterns = ", ".join(repr(pattern.pattern) for pattern, _ in compiled)
                raise ValueError(
                    f"rules: no pattern matches {path!r} of shape {shape} (patterns: {patterns}); "
                    "a last rule ('.*', NormSpec(...)) catches the rest"
                )
            spec = choose(path, shape)
        try:
            matrix_view(spec, shape)
        except ValueError as error:
            raise ValueError(f"norm of {path!r}: {error}") from None
        return spec

    return jax.tree_util.tree_map_with_path(one, params)


def _default(
    params: Any, radius: float, output_radius: float, vector_radius: float, options: dict
) -> Callable[[str, tuple[int, ...]], NormSpec]:
    leaves = _leaves(params)
    is_vector = lambda path, shape: len(shape) < 2 or bool(_VECTOR.search(path))
    is_table = lambda path, shape: (
        bool(_EMBED.search(path)) and not _HEAD.search(path) and len(shape) < 4
    )
    weights = [(path, shape) for path, shape in leaves if not is_vector(path, shape)]
    matrices = sorted((path for path, shape in weights if not is_table(path, shape)), key=_natural)
    heads = {path for path in matrices if _HEAD.search(path)}
    masked = any(isinstance(leaf, MaskedNode) for leaf in jax.tree.leaves(
        params, is_leaf=lambda x: isinstance(x, MaskedNode)))
    if not heads and not masked and len(matrices) > 1:
        heads = {matrices[-1]}
    embeds = any(is_table(path, shape) for path, shape in weights)
    inner = [path for path in matrices if path not in heads]
    first = inner[0] if inner and not embeds and not masked else None

    def choose(path: str, shape: tuple[int, ...]) -> NormSpec:
        if is_vector(path, shape):
            return NormSpec("rms", vector_radius)
        if path in heads:
            return NormSpec("linf", output_radius, scale="fan_in")
        if is_table(path, shape):
            return NormSpec("per_input", radius)
        if len(shape) > 2 and _SPLIT_HEADS.search(path):
            return NormSpec("spectral", radius, dims=MuonDimensionNumbers(-3, (-2, -1)), **options)
        if len(shape) > 2 and _JOIN_HEADS.search(path):
            return NormSpec("spectral", radius, dims=MuonDimensionNumbers((-3, -2), -1), **options)
        if _CONV.search(path) or len(shape) > 3:
            return NormSpec("spectral_conv", radius, **options)
        return NormSpec("spectral", radius, scale="max" if path == first else None, **options)

    return choose


def _by_dims(
    params: Any, dims: Any, radius: float, default: Callable, options: dict
) -> Callable[[str, tuple[int, ...]], NormSpec]:
    is_dims = lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    chosen: dict[str, MuonDimensionNumbers] = {}

    def note(key_path: tuple, spec: Any, part: Any) -> None:
        if not is_dims(spec):
            raise TypeError(f"dims: expected MuonDimensionNumbers or None at "
                            f"{path_str(key_path)!r}, got {spec!r}")
        if spec is not None:
            for inner, _ in jax.tree_util.tree_leaves_with_path(part):
                chosen[path_str((*key_path, *inner))] = spec

    try:
        jax.tree_util.tree_map_with_path(note, dims, params, is_leaf=is_dims)
    except ValueError as error:
        raise ValueError(
            f"dims: must have the structure of params or of its upper part: {error}"
        ) from None

    def choose(path: str, shape: tuple[int, ...]) -> NormSpec:
        if path in chosen:
            return NormSpec("spectral", radius, scale="max", dims=chosen[path], **options)
        spec = default(path, shape)
        if spec.name.startswith("spectral"):
            return NormSpec("linf", spec.radius, scale="fan_in")
        return spec

    return choose


def weight_dimension_numbers(norm: Any, params: Any) -> Any:
    """The ``MuonDimensionNumbers`` of every spectral leaf and ``None`` for all others.

    The other way round: hand the result to ``optax.contrib.muon`` as
    ``muon_weight_dimension_numbers`` and it works on the same set of matrices.

    >>> import jax.numpy as jnp
    >>> weight_dimension_numbers("spectral", {"w": jnp.ones((4, 8))})["w"]
    MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))
    """

    def one(leaf: Any, spec: NormSpec) -> MuonDimensionNumbers | None:
        if spec.name not in ("spectral", "spectral_conv"):
            return None
        if spec.dims is not None:
            return spec.dims
        last = len(np.shape(leaf)) - 1
        inputs = tuple(range(last)) if spec.name == "spectral_conv" else (last - 1,)
        return MuonDimensionNumbers(inputs, (last,))

    return jax.tree.map(one, params, broadcast_specs(norm, params))
