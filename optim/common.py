"""What every transform of this package shares: checks, schedules, dtypes, emission.

Hyperparameters may be numbers, arrays or schedules. Numbers are validated when the transform
is built; arrays are not, so ``optax.inject_hyperparams`` and ``vmap`` may pass tracers.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_real

Schedule = Callable[[jax.Array], jax.Array]
ScalarOrSchedule = float | jax.Array | Schedule

# inject_hyperparams takes every callable for a schedule, and calls it with the count.
_STATIC = " (with optax.inject_hyperparams, name this argument in static_args)"


def check_hyperparameter(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
    schedule: bool = True,
) -> None:
    """Check a hyperparameter if it is a Python number; let arrays and schedules pass.

    Raises:
      ValueError: a number outside ``[minimum, maximum]`` (open if ``exclusive``), or a schedule
        where none is allowed.
      TypeError: neither a number, nor an array of shape ``()``, nor a schedule.
    """
    if isinstance(value, numbers.Real) or isinstance(value, bool):
        check_real(name, value, minimum=minimum, maximum=maximum, exclusive=exclusive)
    elif callable(value):
        if not schedule:
            raise ValueError(f"{name}: must stay constant, got the schedule {value!r}")
    elif not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{name}: expected a number, an array or a schedule, got {value!r}")
    elif np.shape(value):
        raise TypeError(f"{name}: expected a scalar, got an array of shape {np.shape(value)}")


def check_dtype(name: str, value: Any) -> None:
    """Raise unless ``value`` is ``None`` or a dtype.

    Raises:
      TypeError: anything else, such as what ``optax.inject_hyperparams`` makes of a dtype.
    """
    try:
        if isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError
        if value is not None:
            jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: expected a dtype, got {value!r}{_STATIC}") from None


def check_function(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is ``None`` or a function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function, got {value!r}{_STATIC}")


def resolve_mask(mask: Any, params: Any) -> Any:
    """The tree of booleans that ``mask``, a tree or a function of the parameters, stands for.

    Raises:
      TypeError: a leaf that is not ``True`` or ``False``, or one value for the whole tree, which
        is what ``optax.inject_hyperparams`` makes of a function of the parameters.
    """
    if isinstance(mask, (bool, np.bool_)):
        raise TypeError(f"mask: expected a tree of booleans or a function, got {mask!r}{_STATIC}")
    chosen = mask(params) if callable(mask) else mask
    for leaf in jax.tree.leaves(chosen):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(f"mask: expected True or False at every leaf, got {leaf!r}{_STATIC}")
    return chosen


def at(value: ScalarOrSchedule, count: jax.Array) -> jax.Array | float:
    """The hyperparameter at step ``count`` (a 0-based int32 scalar)."""
    return value(count) if callable(value) else value


def need_params(params: Any, method: str) -> None:
    """Raise when a transform that reads the parameters was called without them."""
    if params is None:
        raise ValueError(
            f"params is required by {method}: call update(gradients, state, params)"
        )


def check_leaves(name: str, tree: Any) -> None:
    """Raise unless every leaf of ``tree`` is a real floating-point array.

    Raises:
      ValueError: an integer, boolean or complex leaf; the message names its path.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)}: expected a real floating-point array, "
                f"got dtype {dtype}"
            )


def state_dtype_of(leaf: Any, dtype: Any = None) -> Any:
    """``dtype``, or the leaf's own where that has 32 bits or more, else float32."""
    if dtype is not None:
        return dtype
    return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def scalar_dtype(state: Any) -> Any:
    """The dtype for scalars that sum over the leaves of ``state``: float32, or float64."""
    return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(state)))


def copy_to_state(tree: Any, dtype: Any = None) -> Any:
    """A copy of ``tree`` in the state's dtype, in buffers of its own (so donation works)."""
    return jax.tree.map(
        lambda p: jnp.array(p, dtype=state_dtype_of(p, dtype), copy=True), tree
    )


def zeros_in_state(tree: Any, dtype: Any = None) -> Any:
    """Zeros in the shape and sharding of ``tree``, in the state's dtype.

    Under ``jit`` a constant would forget the sharding, so the zeros depend on ``tree`` in form.
    """
    return jax.tree.map(
        lambda p: jnp.where(p == p, 0.0, 0.0).astype(state_dtype_of(p, dtype)), tree
    )


def displacement(new: Any, params: Any, update_dtype: Any = None) -> Any:
    """What ``optax.apply_updates`` must add to ``params`` to arrive at ``new``.

    The target is rounded to the parameter's dtype first: in bfloat16 the difference of two
    rounded numbers is nearly always exact, while a rounded difference of exact numbers is not.
    ``update_dtype`` asks for the exact difference in another dtype instead.
    """

    def one(x: jax.Array, p: Any) -> jax.Array:
        p = jnp.asarray(p)
        if update_dtype is not None:
            return x.astype(update_dtype) - p.astype(update_dtype)
        return x.astype(p.dtype) - p

    return jax.tree.map(one, new, params)
