r"""Sites: a matrix product whose weights, activations or both are held in low-bit formats.

W4A16 needs nothing but a :class:`~fadex.quant.QuantizedArray` in place of the weight. Where the
activations are quantized too (W4A4, W8A8), the weight's place in the tree is taken by a
:class:`QuantizedSite`, which carries the activation format and, for static scaling, the scale that
:func:`calibrate_activations` found:

.. math:: y = Q_a(x)\, Q_w(W).

``fadex.models.layers.Linear`` runs either through :func:`site_matmul`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.pytree import flatten_with_paths
from fadex.quant.formats import Format
from fadex.quant.qarray import _NO_ARRAY, QuantizedArray, _called

__all__ = ["QuantizedSite", "Site", "calibrate_activations", "site_matmul"]


@dataclasses.dataclass(frozen=True)
class Site:
    """A recipe's target that names an activation format beside the one of the weights.

    Attributes:
      weights: format of the weight, or ``None`` to leave it as it is.
      activations: format of what the weight is multiplied with, cut into blocks along its last
        axis; ``None`` for none.

    Example:
      >>> from fadex.quant import Site, int_group, razer_e3m3, razer_e4m3
      >>> w4a4 = Site(razer_e3m3(), razer_e4m3())
      >>> w8a8 = Site(int_group(8, None), int_group(8, None))
    """

    weights: Format | None
    activations: Format | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "activations"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Format):
                raise ValueError(
                    f"{name}: expected a Format or None, got {value!r}{_called(value)}"
                )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "scale", "probe"],
    meta_fields=["activations"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedSite:
    """A weight and the format of the activations that meet it. A pytree node.

    Attributes:
      weight: array or :class:`QuantizedArray`.
      scale: static tensor scale of the activations, float32, the weight's leading axes; or
        ``None``: it follows from each input (dynamic).
      probe: ``None`` outside :func:`calibrate_activations`.
      activations: the activation format. Static.
    """

    weight: Any
    scale: jax.Array | None
    probe: jax.Array | None
    activations: Format

    def __getitem__(self, index: Any) -> QuantizedSite:
        if index is Ellipsis:
            return self
        scale = self.scale if self.scale is None or not self.scale.ndim else self.scale[index]
        return dataclasses.replace(self, weight=self.weight[index], scale=scale)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_NO_ARRAY)

    def __jax_array__(self) -> Any:
        raise TypeError(_NO_ARRAY)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype


@jax.custom_vjp
def _observe(x: jax.Array, probe: jax.Array) -> jax.Array:
    del probe
    return x


def _observe_forward(x: jax.Array, probe: jax.Array) -> tuple[jax.Array, Any]:
    amax = jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0.0)
    return x, (amax, probe)


def _observe_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    amax, probe = residuals
    # The largest magnitude, and a count that tells a site that saw zeros from one not reached.
    seen = jnp.stack([amax, jnp.ones_like(amax)])
    return g, jnp.broadcast_to(seen, probe.shape).astype(probe.dtype)


_observe.defvjp(_observe_forward, _observe_backward)


def is_quantized(node: Any) -> bool:
    """Whether a value is a quantized array."""
    return isinstance(node, QuantizedArray)


def site_columns(kernel: Any, start: int, stop: int) -> Any:
    """Columns ``start:stop`` of whatever stands for a weight."""
    if isinstance(kernel, QuantizedSite):
        return dataclasses.replace(kernel, weight=site_columns(kernel.weight, start, stop))
    if isinstance(kernel, QuantizedArray):
        return kernel.columns(start, stop)
    return kernel[..., start:stop]


def site_matmul(x: jax.Array, kernel: Any, *, dtype: Any = None) -> jax.Array:
    """``x @ kernel`` for an array, a :class:`QuantizedArray` or a :class:`QuantizedSite`.

    Args:
      x: ``[..., K]``.
      kernel: ``[K, N]``, or ``[..., K, N]`` where ``x`` has the same leading axes.
      dtype: the weight is cast to it first, as values where it is quantized; default its own.
    """
    from fadex.quant.matmul import qmatmul

    if isinstance(kernel, QuantizedSite):
        if kernel.probe is not None:  # calibration: the weight as it is, the input observed
            return site_matmul(_observe(x, kernel.probe), kernel.weight, dtype=dtype)
        weight = kernel.weight if dtype is None else kernel.weight.astype(dtype)
        if kernel.scale is not None and 0 < kernel.scale.ndim > x.ndim - 2 >= 0:
            # An input that experts share meets each of their scales.
            x = jnp.broadcast_to(x, kernel.scale.shape + x.shape[-2:])
        return qmatmul(x, weight, activation=kernel.activations, activation_scale=kernel.scale)
    kernel = kernel if dtype is None else kernel.astype(dtype)
    return qmatmul(x, kernel) if isinstance(kernel, QuantizedArray) else x @ kernel


def _is_site(node: Any) -> bool:
    return isinstance(node, QuantizedSite)


def calibrate_activations(
    apply: Callable[..., Any], params: Any, batches: Iterable[Any]
) -> Any:
    """Give every site the static activation scale that follows from examples.

    Runs ``apply(params, *batch)`` on each batch and keeps, for every :class:`QuantizedSite`, the
    largest magnitude that met it. The observations travel as cotangents of a probe beside each
    weight, so the model may be jitted, scanned over stacked layers or vmapped. A site that the
    model uses several times in one call gets the sum of its maxima, a scale that never saturates
    but is coarser than need be.

    Args:
      apply: ``(params, *inputs) -> outputs``, a tree of arrays of which at least one depends on
        each site.
      params: parameters as :func:`~fadex.quant.quantize` returns them for a recipe with
        :class:`Site` targets.
      batches: iterable of inputs: a tuple is unpacked, anything else is the only input.

    Returns:
      ``params`` with static scales in the sites whose format has a tensor scale.

    Raises:
      ValueError: no site whose format takes a static scale, no batch, or such a site on which no
        floating-point output depends.
      TypeError: one array in place of batches.
    """
    named = {
        path: node for path, node in flatten_with_paths(params, is_leaf=_is_site).items()
        if _is_site(node)
    }
    if hasattr(batches, "shape"):
        raise TypeError("batches: expected an iterable of inputs, got one array; put it in a list")
    if not named:
        raise ValueError("params: holds no QuantizedSite; quantize with a recipe of Site targets")
    calibrated_sites = {p: n for p, n in named.items() if n.activations.has_tensor_scale}
    if not calibrated_sites:
        names = sorted({site.activations.name for site in named.values()})
        raise ValueError(
            f"params: {', '.join(names)} scale each block by itself and have no tensor scale to "
            "calibrate; use a two-level or per-tensor format"
        )
    named, sites = calibrated_sites, list(calibrated_sites.values())
    takes = lambda node: _is_site(node) and node.activations.has_tensor_scale
    shape = lambda site: (*site.weight.shape[:-2], 2)
    probes = [jnp.zeros(shape(site), jnp.float32) for site in sites]

    def probed(values: list[jax.Array], params: Any) -> Any:
        rest = iter(values)
        return jax.tree.map(
            lambda node: dataclasses.replace(node, probe=next(rest)) if takes(node) else node,
            params, is_leaf=_is_site,
        )

    @jax.jit
    def observe(
        values: list[jax.Array], params: Any, inputs: tuple[Any, ...]
    ) -> list[jax.Array]:
        def total(values: list[jax.Array]) -> jax.Array:
            out = jax.tree.leaves(apply(probed(values, params), *inputs))
            return sum(
                jnp.sum(leaf.astype(jnp.float32)) for leaf in out
                if jnp.issubdtype(leaf.dtype, jnp.floating)
            )

        return jax.grad(total)(values)

    largest = None
    for batch in batches:
        seen = observe(probes, params, batch if isinstance(batch, tuple) else (batch,))
        largest = seen if largest is None else jax.tree.map(jnp.maximum, largest, seen)
    if largest is None:
        raise ValueError("batches: expected at least one batch")
    for path, found in zip(named, largest):
        if not bool(jnp.all(found[..., 1] > 0)):
            raise ValueError(
                f"params: no floating-point output of apply depends on the site {path!r}, so its "
                "inputs were not seen"
            )
    rest = iter(zip(sites, (found[..., 0] for found in largest)))

    def calibrated(node: Any) -> Any:
        if not takes(node):
            return node
        site, amax = next(rest)
        return dataclasses.replace(site, scale=site.activations.tensor_scale(amax))

    return jax.tree.map(calibrated, params, is_leaf=_is_site)
