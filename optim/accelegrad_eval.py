"""The iterate to judge a model at, out of any optimizer state that holds AcceleGrad(#)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.pytree import flatten_with_paths, map_with_path
from fadex.optim.accelegrad import AcceleGradState
from fadex.optim.accelegrad_sharp import AcceleGradSharpState

__all__ = ["accelegrad_eval_params"]


def accelegrad_eval_params(
    state: Any, params: Any, which: str = "y", *, coupling: float | None = None
) -> Any:
    """The parameters to judge a model at, from the state of AcceleGrad or AcceleGrad#.

    Works through ``optax.chain``, ``masked``, ``partition`` (several groups together),
    ``inject_hyperparams``, ``MultiSteps`` and ``flax.nnx.Optimizer`` (``optimizer.opt_state``):
    the states are found by their type, leaves by their paths; leaves that no AcceleGrad state
    holds keep ``params``.

    Args:
      state: an optimizer state with at least one AcceleGrad(#) state, no two for one parameter.
      params: the current parameters, for their structure and dtypes.
      which: ``"y"``, the geometry iterate (default); ``"average"``, ȳ, where it is kept; ``"x"``,
        the gradient point, which is ``params``.
      coupling: τ, for a state without y (``recompute_y=True``): y = (x - τz)/(1 - τ).

    Raises:
      ValueError: no AcceleGrad state, two for one parameter, or an iterate it does not keep.

    >>> import jax.numpy as jnp
    >>> from fadex.optim import accelegrad_sharp
    >>> params = {"w": jnp.ones(2)}
    >>> state = accelegrad_sharp(0.1).init(params)
    >>> float(accelegrad_eval_params(state, params)["w"][0])
    1.0
    """
    if which == "x":
        return params
    if which not in ("y", "average"):
        raise ValueError(f"which: expected 'y', 'average' or 'x', got {which!r}")
    ours = (AcceleGradState, AcceleGradSharpState)
    is_ours = lambda node: isinstance(node, ours)
    states = [s for s in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(s)]
    if not states:
        raise ValueError("state: found no AcceleGrad or AcceleGrad# state in it")
    found: dict[str, jax.Array] = {}
    anchors: dict[str, jax.Array] = {}
    for one in states:
        iterate = getattr(one, which)
        kept = not (isinstance(iterate, tuple) and iterate == ())
        if not kept and which == "average":
            raise ValueError(
                "which: this state keeps no average; pass average=True to the optimizer"
            )
        if not kept and coupling is None:
            raise ValueError("coupling: this state keeps no y (recompute_y=True); give its "
                             "coupling so that y can be recomputed")
        leaves = flatten_with_paths(iterate if kept else one.z)
        twice = sorted((found.keys() | anchors.keys()) & leaves.keys())
        if twice:
            raise ValueError(f"state: two AcceleGrad states hold {twice[0]!r}; give the one that "
                             "is meant")
        (found if kept else anchors).update(leaves)

    def pick(path: str, leaf: Any) -> Any:
        x = jnp.asarray(leaf)
        if path in anchors:
            y = (x - coupling * jnp.asarray(anchors[path])) / (1 - coupling)
        else:
            y = jnp.asarray(found[path]) if path in found else x
        return y.astype(x.dtype)

    return map_with_path(pick, params)
