r"""A surrogate as an optax transform: gradients at the quantized weights in, latent ones out.

Instead of differentiating through fake quantization, take the gradient where the forward pass ran
and multiply:

.. math:: g_i = \frac{\partial L}{\partial \hat w_i}(\hat w)\, S(w_i / s).

The surrogate is linear in the tangent, so both routes agree to rounding, and the transform chains
with any optimizer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_choice
from fadex.core.pytree import map_with_path
from fadex.quant.qat.fake_quant import selected_formats, surrogate_factor
from fadex.quant.qat.perturbations import Kernel, ste
from fadex.quant.qat.surrogates import EDGES
from fadex.quant.recipes import as_recipe

__all__ = ["ZoeSurrogateState", "zoe_surrogate"]


class ZoeSurrogateState(NamedTuple):
    """State of :func:`zoe_surrogate` where the radius follows a schedule."""

    count: jax.Array  # int32 []: steps made


def zoe_surrogate(
    recipe: Any, kernel: Kernel = ste(), *, edge: str = "pass", min_size: int = 1024
) -> optax.GradientTransformation:
    """Multiply the gradients of the quantized leaves by the surrogate's weight at the latents.

    Feed it with gradients of the loss at ``fake_quant(params, recipe)`` (or at
    ``dequantize(quantize(params, recipe))``): taken with respect to those dense values, not
    through the quantizer.

    Args:
      recipe, min_size: as for :func:`~fadex.quant.qat.fake_quant`; what it leaves alone keeps its
        gradient. Static.
      kernel: such as ``gaussian(0.35)``; a schedule of its radius is evaluated at the number of
        updates made, as ``gaussian(optax.linear_schedule(0.5, 0.25, 1000))``.
      edge: as for :func:`~fadex.quant.qat.fake_quant_array`.

    Returns:
      ``optax.GradientTransformation``; ``update`` needs ``params``. State: ``EmptyState``, or a
      count under a schedule. Updates keep the dtype of the gradients; the product is formed in
      float32.

    Raises:
      ValueError: ``update`` without ``params``, an unknown ``edge``, what the recipe raises.
      TypeError: no kernel.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fadex.quant import int_group
      >>> from fadex.quant.qat import fake_quant, gaussian, zoe_surrogate
      >>> recipe = int_group(2, 32)
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (32, 32))}
      >>> tx = optax.chain(zoe_surrogate(recipe, gaussian(0.35)), optax.adam(1e-2))
      >>> state = tx.init(params)
      >>> loss = lambda dense: jnp.sum(dense["kernel"] ** 2)
      >>> grads = jax.grad(loss)(fake_quant(params, recipe))
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel: expected a Kernel such as gaussian(0.35), got {kernel!r}")
    check_choice("edge", edge, EDGES)
    recipe = as_recipe(recipe)

    def init_fn(params: Any) -> Any:
        del params
        return ZoeSurrogateState(jnp.zeros((), jnp.int32)) if kernel.scheduled else (
            optax.EmptyState()
        )

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError(
                "params is required by zoe_surrogate: call update(gradients, state, params)"
            )
        now = kernel
        if kernel.scheduled:
            now = kernel.at(state.count)
            state = ZoeSurrogateState(optax.safe_increment(state.count))
        chosen = selected_formats(params, recipe, min_size)

        def scale(path: str, w: Any, gradient: Any) -> Any:
            if path not in chosen:
                return gradient
            fmt, axis = chosen[path]
            factor = surrogate_factor(w, fmt, now, axis=axis, edge=edge)
            gradient = jnp.asarray(gradient)
            return (gradient.astype(factor.dtype) * factor).astype(gradient.dtype)

        return map_with_path(scale, params, updates), state

    return optax.GradientTransformation(init_fn, update_fn)
