r"""BERT encoder that turns a sentence into one vector.

Source: Devlin et al., "BERT", arXiv 1810.04805; Reimers & Gurevych, "Sentence-BERT",
arXiv 1908.10084.

Words, positions and token types are embedded, added and normalised; each layer is post-norm:

.. math::
   h &\leftarrow \mathrm{LN}\big(h + \mathrm{Attn}(h)\big), \qquad
   h \leftarrow \mathrm{LN}\big(h + \mathrm{MLP}(h)\big),

with erf-GELU in the MLP. The sentence vector is pooled over the tokens that the mask keeps,

.. math:: e = \frac{\sum_n m_n h_n}{\sum_n m_n}, \qquad \hat e = e / \lVert e \rVert_2 .

Parameters are called ``layers/0/attention/query/kernel``, ``embeddings/words/embedding``, and so
on; any of them may be a :class:`fadex.quant.QuantizedArray`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fadex.core.checks import check_choice, check_int, check_real
from fadex.models.layers import Embed, Linear, attend, layer_norm

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
POOLINGS = ("mean", "cls", "max")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Static description of an :class:`Encoder`; the defaults are all-MiniLM-L6-v2's.

    Attributes:
      vocabulary: rows of the word table.
      max_positions: rows of the position table, the longest input.
      token_types: rows of the token type table.
      depth, width, num_heads: ``L``, ``D``, ``H``.
      hidden: width of the MLP.
      eps: of the layer norms.
      activation: ``"gelu"`` (erf), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.
      pooling: ``"mean"``, ``"cls"`` (the first token) or ``"max"``.
      normalize: whether sentence vectors get length 1.
      scan_layers: stack the layers on a leading axis and run them under ``lax.scan``: compile
        time no longer grows with depth. Paths then lack the index: ``layers/mlp/fc1/kernel``.
      dtype, param_dtype: of products and of parameters; norms, softmax and pooling run in
        float32.
    """

    vocabulary: int = 30522
    max_positions: int = 512
    token_types: int = 2
    depth: int = 6
    width: int = 384
    num_heads: int = 12
    hidden: int = 1536
    eps: float = 1e-12
    activation: str = "gelu"
    pooling: str = "mean"
    normalize: bool = True
    scan_layers: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        for name in ("vocabulary", "max_positions", "token_types", "depth", "width", "num_heads",
                     "hidden"):
            check_int(name, getattr(self, name), minimum=1)
        check_real("eps", self.eps, minimum=0.0)
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("pooling", self.pooling, POOLINGS)
        if self.width % self.num_heads:
            raise ValueError(f"num_heads: must divide width={self.width}, got {self.num_heads}")


class _Norm(nnx.Module):
    """Layer norm with scale and shift."""

    def __init__(self, config: EncoderConfig):
        self.scale = nnx.Param(jnp.ones((config.width,), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((config.width,), config.param_dtype))
        self.eps = config.eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = layer_norm(x.astype(jnp.float32), self.eps)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class _Embeddings(nnx.Module):
    """Sum of three tables, normalised."""

    def __init__(self, config: EncoderConfig, kwargs: dict[str, Any]):
        self.words = Embed(config.vocabulary, config.width, **kwargs)
        self.positions = Embed(config.max_positions, config.width, **kwargs)
        self.types = Embed(config.token_types, config.width, **kwargs)
        self.norm = _Norm(config)

    def __call__(self, ids: jax.Array, token_types: jax.Array) -> jax.Array:
        places = self.positions(jnp.arange(ids.shape[1]))
        return self.norm(self.words(ids) + places + self.types(token_types))


class _Attention(nnx.Module):
    """Multi-head self-attention over the tokens that the mask keeps."""

    def __init__(self, config: EncoderConfig, kwargs: dict[str, Any]):
        self.num_heads = config.num_heads
        for name in ("query", "key", "value", "out"):
            setattr(self, name, Linear(config.width, config.width, **kwargs))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)
        q, k, v = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        mixed = attend(q, k, v, mask[:, None, None, :])
        return self.out(mixed.reshape(x.shape))


class _Mlp(nnx.Module):
    def __init__(self, config: EncoderConfig, kwargs: dict[str, Any]):
        self.fc1 = Linear(config.width, config.hidden, **kwargs)
        self.fc2 = Linear(config.hidden, config.width, **kwargs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class _LayerOutputs(NamedTuple):
    attention: jax.Array
    mlp: jax.Array
    state: jax.Array


class EncoderLayer(nnx.Module):
    """Post-norm attention and MLP."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        self.attention = _Attention(config, kwargs)
        self.attention_norm = _Norm(config)
        self.mlp = _Mlp(config, kwargs)
        self.mlp_norm = _Norm(config)

    def __call__(self, h: jax.Array, mask: jax.Array) -> _LayerOutputs:
        """The new hidden state, and what attention and MLP added before their norms."""
        attention = self.attention(h, mask)
        h = self.attention_norm(h + attention)
        mlp = self.mlp(h)
        return _LayerOutputs(attention, mlp, self.mlp_norm(h + mlp))


class Encoder(nnx.Module):
    """Sentence encoder, called as ``model(ids, mask, token_types)``.

    Args of the call:
      ids: token ids, int ``[B, N]`` with ``N <= config.max_positions``.
      mask: bool or 0/1 ``[B, N]``, true where a token counts; default: everywhere. Rows without
        any token give a finite vector that means nothing.
      token_types: int ``[B, N]``; default zeros.

    Returns sentence vectors ``[B, D]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fadex.models import Encoder, EncoderConfig
      >>> config = EncoderConfig(vocabulary=50, depth=2, width=32, num_heads=2, hidden=64)
      >>> model = Encoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((3, 7), jnp.int32)).shape
      (3, 32)
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        self.embeddings = _Embeddings(config, kwargs)
        layers = [EncoderLayer(config, rngs=rngs) for _ in range(config.depth)]
        if config.scan_layers:
            graphdef, states = nnx.split(layers[0])[0], [nnx.state(layer) for layer in layers]
            self.layers = nnx.merge(graphdef, jax.tree.map(lambda *a: jnp.stack(a), *states))
        else:
            self.layers = nnx.List(layers)

    def __call__(
        self, ids: jax.Array, mask: jax.Array | None = None, token_types: jax.Array | None = None
    ) -> jax.Array:
        ids, mask, token_types = self._check(ids, mask, token_types)
        h, _ = self._run(self.embeddings(ids, token_types), mask, keep=False)
        return self.pool(h, mask)

    def with_features(
        self, ids: jax.Array, mask: jax.Array | None = None, token_types: jax.Array | None = None,
        names: Sequence[str] = ("tokens",),
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sentence vectors, and hidden states ``[B, N, D]`` by name.

        Names: ``"embeddings"``; ``"layers/0"`` (the state behind that layer);
        ``"layers/0/attention"`` and ``"layers/0/mlp"`` (what they add, before the norm);
        ``"tokens"`` (the last state). ``names`` is static.
        """
        for name in names:
            check_choice("names", name, self.feature_names())
        ids, mask, token_types = self._check(ids, mask, token_types)
        h0 = self.embeddings(ids, token_types)
        h, outputs = self._run(h0, mask, keep=True)
        found = {"embeddings": h0, "tokens": h}
        for i, layer in enumerate(outputs):
            found |= {f"layers/{i}": layer.state, f"layers/{i}/attention": layer.attention,
                      f"layers/{i}/mlp": layer.mlp}
        return self.pool(h, mask), {name: found[name] for name in names}

    def feature_names(self) -> list[str]:
        """All names that :meth:`with_features` knows."""
        parts = ("", "/attention", "/mlp")
        layers = [f"layers/{i}{part}" for i in range(self.config.depth) for part in parts]
        return ["embeddings", *layers, "tokens"]

    def pool(self, h: jax.Array, mask: jax.Array) -> jax.Array:
        """Sentence vectors ``[B, D]`` of hidden states ``[B, N, D]`` and a bool mask ``[B, N]``."""
        h = h.astype(jnp.float32)
        weights = mask.astype(jnp.float32)[..., None]
        if self.config.pooling == "mean":
            # As sentence-transformers guards the mean.
            pooled = (h * weights).sum(1) / jnp.maximum(weights.sum(1), 1e-9)
        elif self.config.pooling == "cls":
            pooled = h[:, 0]
        else:
            pooled = jnp.where(weights > 0, h, -1e9).max(1)
        if self.config.normalize:
            # Under the root, so that the gradient at zero is zero.
            square = jnp.square(pooled).sum(-1, keepdims=True)
            pooled = pooled * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
        return pooled

    def _check(
        self, ids: jax.Array, mask: jax.Array | None, token_types: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids = jnp.asarray(ids)
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids: expected integers [B, N], got {ids.dtype}{list(ids.shape)}")
        if not 1 <= ids.shape[1] <= self.config.max_positions:
            raise ValueError(
                f"ids: expected 1 to max_positions={self.config.max_positions} tokens, got "
                f"{ids.shape[1]}"
            )
        mask = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask) != 0
        token_types = jnp.zeros_like(ids) if token_types is None else jnp.asarray(token_types)
        for name, value in (("mask", mask), ("token_types", token_types)):
            if value.shape != ids.shape:
                raise ValueError(
                    f"{name}: expected the shape of ids {ids.shape}, got {value.shape}"
                )
        return ids, mask, token_types

    def _run(
        self, h: jax.Array, mask: jax.Array, *, keep: bool
    ) -> tuple[jax.Array, list[_LayerOutputs]]:
        if not self.config.scan_layers:
            kept = []
            for layer in self.layers:
                outputs = layer(h, mask)
                h = outputs.state
                kept.append(outputs)
            return h, kept if keep else []
        graphdef, state = nnx.split(self.layers)

        def body(h: jax.Array, params: Any) -> tuple[jax.Array, _LayerOutputs | None]:
            outputs = nnx.merge(graphdef, params)(h, mask)
            return outputs.state, outputs if keep else None

        h, stacked = jax.lax.scan(body, h, state)
        layer = lambda i: jax.tree.map(lambda a: a[i], stacked)
        return h, [layer(i) for i in range(self.config.depth)] if keep else []


@dataclasses.dataclass(frozen=True)
class _Method:
    """A method of the model that ``graphdef`` describes, as a pure function; equal definitions
    give equal functions, so that wrapping a model twice compiles nothing twice."""

    graphdef: Any
    name: str

    def __call__(self, params: Any, *args: Any) -> Any:
        return getattr(nnx.merge(self.graphdef, params), self.name)(*args)


class SentenceEncoder(NamedTuple):
    """An :class:`Encoder` as pure functions of its parameters; hashable.

    Attributes:
      apply: ``(params, ids, mask=None, token_types=None) -> [B, D]``.
      with_features: ``(params, ids, mask, token_types, names) -> ([B, D], features)``.
      config: the :class:`EncoderConfig`.
    """

    apply: Callable[..., jax.Array]
    with_features: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    config: EncoderConfig


def from_encoder(model: Encoder) -> tuple[SentenceEncoder, nnx.State]:
    """Split an :class:`Encoder` into pure functions and its parameters.

    The parameters are an ``nnx.State``; ``fadex.quant.quantize(params, recipe)`` may replace
    matrices in it, and ``apply`` then runs on the packed codes.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fadex.models import Encoder, EncoderConfig, from_encoder
      >>> config = EncoderConfig(vocabulary=50, depth=2, width=32, num_heads=2, hidden=64)
      >>> encoder, params = from_encoder(Encoder(config, rngs=nnx.Rngs(0)))
      >>> encoder.apply(params, jnp.ones((3, 7), jnp.int32)).shape
      (3, 32)
    """
    if not isinstance(model, Encoder):
        raise TypeError(f"model: expected an Encoder, got {type(model).__name__}")
    graphdef, params = nnx.split(model)
    methods = (_Method(graphdef, name) for name in ("__call__", "with_features"))
    return SentenceEncoder(*methods, model.config), params
