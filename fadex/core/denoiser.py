r"""The denoiser protocol: what samplers and caches ask of a model.

A denoiser is a tuple of pure functions, parameters first. ``B`` is the batch, ``x``
the latents ``[B, ...]``, ``t`` the times ``[B]`` (float32), ``cond`` any pytree whose
leaves start with ``B``:

* ``apply(params, x, t, cond) -> out``: velocity or noise prediction, shaped like ``x``
  (or with twice the channels when the model also predicts a variance);
* ``with_features(params, x, t, cond, sites) -> (out, {site: F})``: the full pass, which
  also returns the features at the named sites;
* ``from_features(params, x, t, cond, feats) -> out``: the cheap pass that starts from
  (forecast) features: embeddings, gates and head only;
* ``from_history(params, x, t, cond, weights, history) -> out``: optional fused form of
  ``from_features`` for the site ``"module"``; it gets the ``K`` cached features and their
  weights and may combine them where they are used.

Adaptive policies, which decide at run time whether a step is computed, ask for a pass that can
be stopped and resumed. ``hidden`` and ``residual`` are pytrees of ``[B, ...]`` arrays, and
``blocks`` is a static number of leading blocks:

* ``begin(params, x, t, cond, blocks) -> hidden``: embeddings and the first ``blocks`` blocks;
* ``finish(params, x, t, cond, hidden, blocks) -> (out, residual)``: the remaining blocks and
  the head; ``residual`` is what those blocks added to ``hidden``;
* ``resume(params, x, t, cond, hidden, residual) -> out``: the head of ``hidden + residual``,
  with a residual kept from an earlier step;
* ``modulated(params, x, t, cond) -> signal``: the modulated input of the first block, the
  signal of TeaCache;
* ``refresh(params, x, t, cond, feature, tokens) -> (out, feature)``: the pass of ToCa: from the
  cached ``"module"`` feature, with the MLPs computed anew for some tokens.

Only ``apply`` is required; the others open what they are named for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Params = Any
ApplyFn = Callable[[Params, jax.Array, jax.Array, Any], jax.Array]


class Denoiser(NamedTuple):
    """Pure functions of one model; hashable, so a jitted sampler can take it as static."""

    apply: ApplyFn
    with_features: Callable[..., Any] | None = None
    from_features: Callable[..., jax.Array] | None = None
    from_history: Callable[..., jax.Array] | None = None
    begin: Callable[..., Any] | None = None
    finish: Callable[..., tuple[jax.Array, Any]] | None = None
    resume: Callable[..., jax.Array] | None = None
    modulated: Callable[..., jax.Array] | None = None
    refresh: Callable[..., tuple[jax.Array, jax.Array]] | None = None


@dataclasses.dataclass(frozen=True)
class _NnxMethod:
    """``method`` of the nnx model described by ``graphdef``, as a pure function.

    Equal graph definitions give equal (and equally hashed) functions, so wrapping the
    same architecture twice does not compile anything twice.
    """

    graphdef: Any
    method: str

    def __call__(self, params: Params, *args: Any) -> Any:
        from flax import nnx

        return getattr(nnx.merge(self.graphdef, params), self.method)(*args)


@dataclasses.dataclass(frozen=True)
class _LinenMethod:
    """``method`` of a linen module (a frozen dataclass, hence comparable) as a pure function."""

    module: Any
    method: str

    def __call__(self, params: Params, *args: Any) -> Any:
        return self.module.apply(params, *args, method=self.method)


def _assemble(wrap: Callable[[str], Any], owner: Any) -> Denoiser:
    optional = {
        name: wrap(name) if callable(getattr(owner, name, None)) else None
        for name in Denoiser._fields if name != "apply"
    }
    return Denoiser(apply=wrap("__call__"), **optional)


def _changing_state(model: Any) -> list[str]:
    """Paths of variables that a call of ``model`` would update."""
    from flax import nnx

    nodes = list(nnx.iter_graph(model))
    modules = [node for _, node in nodes if isinstance(node, nnx.Module)]
    # Random streams stand still when every dropout is off, statistics when they are only read.
    random = any(getattr(m, "deterministic", None) is False for m in modules)
    training = any(getattr(m, "use_running_average", None) is False for m in modules)
    found = []
    for path, node in nodes:
        if not isinstance(node, nnx.Variable) or isinstance(node, nnx.Param):
            continue
        still = (isinstance(node, nnx.RngState) and not random) or (
            isinstance(node, nnx.BatchStat) and not training
        )
        if not still:
            found.append("/".join(map(str, path)))
    return found


def from_nnx(model: Any) -> tuple[Denoiser, Params]:
    """Split a ``flax.nnx`` model into a :class:`Denoiser` and its parameters.

    The model is called as ``model(x, t, cond)``; the optional methods of :class:`Denoiser` are
    used where the model defines them under the same names.

    Constant arrays that the model carries (position tables and the like) travel with the
    parameters.

    Raises:
      ValueError: a call would change the model's state (active dropout, batch norm in training
        mode, a cache). A sampler calls the model as a pure function, so such state would
        silently stand still: call ``model.eval()`` first.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from fadex.models import from_nnx
      >>> class Tiny(nnx.Module):
      ...   def __init__(self, rngs):
      ...     self.linear = nnx.Linear(3, 3, rngs=rngs)
      ...   def __call__(self, x, t, cond):
      ...     return self.linear(x) * t[:, None, None, None]
      >>> denoiser, params = from_nnx(Tiny(nnx.Rngs(0)))
      >>> denoiser.apply(params, jnp.ones((2, 4, 4, 3)), jnp.ones(2), None).shape
      (2, 4, 4, 3)
    """
    from flax import nnx

    names = _changing_state(model)
    if names:
        raise ValueError(
            f"model: holds mutable collections ({', '.join(names[:5])}) that a call would "
            "change; call model.eval() before sampling"
        )
    graphdef, params = nnx.split(model)
    return _assemble(lambda name: _NnxMethod(graphdef, name), model), params


def from_linen(module: Any, variables: Any) -> tuple[Denoiser, Params]:
    """Wrap a ``flax.linen`` module and its ``variables`` as ``(Denoiser, params)``.

    ``params`` is the whole ``variables`` dict, so constants beside ``"params"`` travel too.

    Raises:
      ValueError: ``variables`` has no ``"params"``, or holds collections that a forward
        pass would update (``batch_stats``, ``cache``).
    """
    if "params" not in variables:
        raise ValueError(
            f"variables: expected a dict with 'params', got the keys {sorted(variables)}"
        )
    mutable = sorted(set(variables) & {"batch_stats", "cache", "intermediates"})
    if mutable:
        raise ValueError(f"model: holds mutable collections ({', '.join(mutable)})")
    try:
        hash(module)
    except TypeError as error:
        raise ValueError(
            f"module: its fields must be hashable for a jitted sampler ({error}); use tuples in "
            "place of lists and arrays"
        ) from error
    return _assemble(lambda name: _LinenMethod(module, name), module), dict(variables)
