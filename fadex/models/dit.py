r"""DiT: class-conditional diffusion transformer with adaLN-zero.

Source: Peebles & Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748.

With ``c = MLP(freq(t)) + Emb(y)`` each block computes

.. math::
   h &\mathrel{+}= g_1 \cdot \mathrm{Attn}(\mathrm{LN}(h)(1+s_1)+b_1), \\
   h &\mathrel{+}= g_2 \cdot \mathrm{MLP}(\mathrm{LN}(h)(1+s_2)+b_2),

where :math:`(b_1,s_1,g_1,b_2,s_2,g_2)=\mathrm{Linear}(\mathrm{silu}(c))`. The modulation and
the output projection start at zero, so an untrained model predicts exactly zero.

Sites for feature caching (``with_features`` / ``from_features``):

* ``"crf"``: cumulative residual :math:`h_L - h_0`, ``[B, N, D]``;
* ``"module"``: the outputs of every attention and MLP before their gates,
  ``[2L, B, N, D]`` in the order ``block0/attn, block0/mlp, block1/attn, ...``. The gates come
  from the current time, also at skipped steps;
* ``"attention"``: the attention that each token receives, ``[L, B, N]`` float32, the mean over
  heads and the sum over queries (the mean over tokens is 1). A score for token-wise caching,
  nothing that a pass could start from.

Adaptive policies use ``begin`` / ``finish`` / ``resume`` (a pass that stops after some blocks),
``modulated`` and ``refresh``; see :mod:`fadex.core.denoiser`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fadex.core.checks import check_choice, check_int, check_real
from fadex.models.kernels import gated_forecast
from fadex.models.layers import (
    Attention,
    Embed,
    Linear,
    Mlp,
    TimestepEmbedding,
    layer_norm,
    modulate,
    sincos_2d,
)

_SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


@dataclasses.dataclass(frozen=True)
class DiTConfig:
    """Static description of a :class:`DiT`.

    Attributes:
      patch_size: side of a square patch, in latent pixels.
      in_channels: channels of the latents.
      depth, width, num_heads: ``L``, ``D``, ``H``.
      mlp_ratio: hidden width of the MLP over ``width``.
      num_classes: classes; the label ``num_classes`` is the null label when
        ``class_dropout > 0``.
      class_dropout: probability with which training replaces a label by the null label
        (see :func:`drop_labels`); 0 leaves the null row out of the table.
      learn_sigma: predict twice the channels (noise and variance).
      time_scale: factor on ``t`` before its embedding. 1000 for flow matching on ``[0, 1]``,
        1 for models that get timestep indices in ``[0, 1000)``.
      time_max_period: longest period of the time frequencies.
      scan_layers: stack the blocks on a leading axis and run them under ``lax.scan``: compile
        time of the full pass no longer grows with depth (the cheap pass of the site
        ``"module"`` stays unrolled: its kernels read each layer's cache in place).
      dtype, param_dtype: of products and of parameters.
      token_sharding: how hidden states ``[B, N, D]`` lie over devices: a
        ``jax.sharding.NamedSharding`` on a mesh with ``Auto`` axes, or a ``PartitionSpec``
        under ``jax.set_mesh``, e.g. ``PartitionSpec(None, "seq")``. Tokens stay spread through
        every block (attention gathers keys and values), and so do features and caches. The
        cheap pass at ``"module"`` is then plain ``jnp``: XLA cannot split a kernel.
    """

    patch_size: int = 2
    in_channels: int = 4
    depth: int = 12
    width: int = 384
    num_heads: int = 6
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    class_dropout: float = 0.1
    learn_sigma: bool = False
    time_scale: float = 1000.0
    time_max_period: float = 1e4
    scan_layers: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    token_sharding: Any = None

    def __post_init__(self):
        for name in ("patch_size", "in_channels", "depth", "width", "num_heads", "num_classes"):
            check_int(name, getattr(self, name), minimum=1)
        check_real("class_dropout", self.class_dropout, minimum=0.0, maximum=1.0)
        check_real("mlp_ratio", self.mlp_ratio, minimum=0.0, exclusive=True)
        if self.width % self.num_heads:
            raise ValueError(
                f"num_heads: must divide width={self.width}, got {self.num_heads}"
            )
        if self.width % 4:
            raise ValueError(f"width: the position table needs a multiple of 4, got {self.width}")

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    @classmethod
    def named(cls, name: str, **overrides: Any) -> DiTConfig:
        """The published sizes: ``"S/2"``, ``"B/4"``, ``"L/2"``, ``"XL/2"``, ...

        Example:
          >>> from fadex.models import DiTConfig
          >>> DiTConfig.named("XL/2").depth
          28
        """
        size, _, patch = name.partition("/")
        check_choice("name", size, tuple(_SIZES))
        if not patch.isdigit():
            raise ValueError(f"name: expected SIZE/PATCH such as 'S/2', got {name!r}")
        depth, width, heads = _SIZES[size]
        fields = dict(depth=depth, width=width, num_heads=heads, patch_size=int(patch))
        return cls(**{**fields, **overrides})


class DiTBlock(nnx.Module):
    """One transformer block, modulated by the conditioning vector."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        width = config.width
        self.attn = Attention(width, config.num_heads, **kwargs)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), **kwargs)
        self.modulation = Linear(width, 6 * width, kernel_init=nnx.initializers.zeros, **kwargs)
        self.token_sharding = config.token_sharding

    def __call__(self, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the new hidden state and the pre-gate outputs ``[2, B, N, D]``."""
        b1, s1, g1, b2, s2, g2 = jnp.split(self.modulation(c), 6, axis=-1)
        attn = _spread(self.attn(modulate(layer_norm(h), b1, s1)), self.token_sharding)
        h = h + g1[:, None] * attn
        mlp = _spread(self.mlp(modulate(layer_norm(h), b2, s2)), self.token_sharding)
        h = h + g2[:, None] * mlp
        return h, jnp.stack([attn, mlp])

    def gates(self, c: jax.Array) -> jax.Array:
        """``(g1, g2)`` as ``[2, B, D]``, a third of the full modulation's cost."""
        width = c.shape[-1]
        columns = self.modulation.columns
        return jnp.stack([columns(c, 2 * width, 3 * width), columns(c, 5 * width, 6 * width)])

    def attention_input(self, h: jax.Array, c: jax.Array) -> jax.Array:
        """What the attention gets: the modulated ``h``, ``[B, N, D]``."""
        shift, scale = jnp.split(self.modulation.columns(c, 0, 2 * c.shape[-1]), 2, axis=-1)
        return modulate(layer_norm(h), shift, scale)

    def attention_received(self, h: jax.Array, c: jax.Array) -> jax.Array:
        """Attention that each token receives ``[B, N]``, its mean over tokens 1."""
        x = self.attention_input(h, c)
        batch, tokens, width = x.shape
        heads = self.attn.num_heads
        q, k = jnp.split(self.attn.qkv.columns(x, 0, 2 * width), 2, axis=-1)
        shape = (batch, tokens, heads, width // heads)
        logits = jnp.einsum(
            "bqhd,bkhd->bhqk", q.reshape(shape), k.reshape(shape),
            preferred_element_type=jnp.float32,
        )
        return jax.nn.softmax(logits * (width // heads) ** -0.5, axis=-1).mean(1).sum(1)

    def refresh(
        self, h: jax.Array, c: jax.Array, feature: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The block from its cached outputs ``[2, B, N, D]``, the MLP anew at ``tokens``."""
        width = c.shape[-1]
        g1, b2, s2, g2 = jnp.split(self.modulation.columns(c, 2 * width, 6 * width), 4, axis=-1)
        attn, mlp = feature
        h = h + g1[:, None] * attn
        if tokens.shape[-1]:
            # gather -> MLP -> scatter: the number of tokens is static, which tokens is not.
            chosen = jnp.take_along_axis(h, tokens[..., None], axis=1)
            chosen = self.mlp(modulate(layer_norm(chosen), b2, s2)).astype(mlp.dtype)
            mlp = mlp.at[jnp.arange(len(h))[:, None], tokens].set(chosen)
        return h + g2[:, None] * mlp, jnp.stack([attn, mlp])


class DiT(nnx.Module):
    """Diffusion transformer, called as ``model(x, t, labels)``.

    Args of the call:
      x: latents ``[B, height, width, C]``; both sides multiples of the patch, square or not.
      t: times ``[B]`` or a scalar, float32.
      labels: int ``[B]``; ``config.num_classes`` is the null label.

    Returns ``[B, height, width, out_channels]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fadex.models import DiT, DiTConfig
      >>> config = DiTConfig(depth=2, width=32, num_heads=2, in_channels=1, num_classes=10)
      >>> model = DiT(config, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((3, 8, 8, 1)), jnp.full(3, 0.5), jnp.arange(3)).shape
      (3, 8, 8, 1)
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        zeros = nnx.initializers.zeros
        patch = config.patch_size**2
        width = config.width
        self.patch_embed = Linear(patch * config.in_channels, width, **kwargs)
        self.time_embed = TimestepEmbedding(
            width, max_period=config.time_max_period, **kwargs
        )
        rows = config.num_classes + (config.class_dropout > 0)
        self.class_embed = Embed(rows, width, **kwargs)
        blocks = [DiTBlock(config, rngs=rngs) for _ in range(config.depth)]
        if config.scan_layers:
            graphdef, states = nnx.split(blocks[0])[0], [nnx.state(block) for block in blocks]
            self.blocks = nnx.merge(graphdef, jax.tree.map(lambda *a: jnp.stack(a), *states))
        else:
            self.blocks = nnx.List(blocks)
        self.final_modulation = Linear(width, 2 * width, kernel_init=zeros, **kwargs)
        self.final_linear = Linear(
            width, patch * config.out_channels, kernel_init=zeros, **kwargs
        )

    def __call__(self, x: jax.Array, t: jax.Array, cond: jax.Array) -> jax.Array:
        h, c = self._embed(x, t, cond)
        h, _ = self._run_blocks(h, c, keep=False)
        return self._head(h, c, x.shape)

    def with_features(
        self, x: jax.Array, t: jax.Array, cond: jax.Array, sites: Sequence[str]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The full pass, with the features at ``sites`` (the module's docstring names them)."""
        _check_sites(sites, ("crf", "module", "attention"))
        h0, c = self._embed(x, t, cond)
        found: dict[str, Any] = {}
        if "attention" in sites:
            h, modules, found["attention"] = self._run_scored(h0, c)
        else:
            h, modules = self._run_blocks(h0, c, keep="module" in sites)
        found |= {"crf": h - h0, "module": modules}
        return self._head(h, c, x.shape), {site: found[site] for site in sites}

    def from_features(
        self, x: jax.Array, t: jax.Array, cond: jax.Array, feats: dict[str, jax.Array]
    ) -> jax.Array:
        """The cheap pass: embeddings, gates and head around the given features."""
        (site,) = feats
        _check_sites([site])
        h, c = self._embed(x, t, cond)
        self._check_feature(feats[site], site, h)
        if site == "crf":
            h = h + feats["crf"].astype(h.dtype)
        else:
            outputs = feats["module"].astype(h.dtype)
            for gate, output in zip(self._gates(c), outputs):
                h = h + gate[:, None] * output
        return self._head(h, c, x.shape)

    def from_history(
        self,
        x: jax.Array,
        t: jax.Array,
        cond: jax.Array,
        weights: jax.Array,
        history: jax.Array,
    ) -> jax.Array:
        """:meth:`from_features` at ``"module"`` from ``K`` snapshots and their weights.

        Each forecast is formed where it is gated (one fused pass over the cache), never
        written to memory. ``weights``: ``[2L, K]``, ``history``: ``[K, 2L, B, N, D]``.
        """
        if self.config.token_sharding is not None:
            forecast = jnp.einsum(
                "gk,kg...->g...", weights, history, preferred_element_type=jnp.float32
            )
            return self.from_features(x, t, cond, {"module": forecast})
        h, c = self._embed(x, t, cond)
        self._check_feature(history[0], "module", h)
        for i, gate in enumerate(self._gates(c)):
            h = gated_forecast(h, gate, weights, history, site=i)
        return self._head(h, c, x.shape)

    def begin(self, x: jax.Array, t: jax.Array, cond: jax.Array, blocks: int) -> jax.Array:
        """Hidden state ``[B, N, D]`` behind the first ``blocks`` blocks (0: the embedding)."""
        h, c = self._embed(x, t, cond)
        return self._run_blocks(h, c, keep=False, stop=self._check_blocks(blocks))[0]

    def finish(
        self, x: jax.Array, t: jax.Array, cond: jax.Array, hidden: jax.Array, blocks: int
    ) -> tuple[jax.Array, jax.Array]:
        """The pass from :meth:`begin` on: the output, and what the blocks added to ``hidden``."""
        _, c = self._embed(x, t, cond)
        h, _ = self._run_blocks(hidden, c, keep=False, start=self._check_blocks(blocks))
        return self._head(h, c, x.shape), h - hidden

    def resume(
        self, x: jax.Array, t: jax.Array, cond: jax.Array, hidden: jax.Array,
        residual: jax.Array,
    ) -> jax.Array:
        """The output of ``hidden + residual``: the head alone, modulated by the current time."""
        h, c = self._embed(x, t, cond)
        self._check_feature(residual, "crf", h)
        return self._head(hidden + residual.astype(hidden.dtype), c, x.shape)

    def modulated(self, x: jax.Array, t: jax.Array, cond: jax.Array) -> jax.Array:
        """What the first block's attention gets, ``[B, N, D]``: TeaCache's signal."""
        h, c = self._embed(x, t, cond)
        if self.config.scan_layers:
            graphdef, state = nnx.split(self.blocks)
            first = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], state))
            return first.attention_input(h, c)
        return self.blocks[0].attention_input(h, c)

    def refresh(
        self, x: jax.Array, t: jax.Array, cond: jax.Array, feature: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The cheap pass at ``"module"`` with the MLPs computed anew for some tokens.

        Args:
          x, t, cond: as in a call.
          feature: ``[2L, B, N, D]`` from an earlier step.
          tokens: int ``[L, B, k]``, for each block the tokens whose MLP is computed.

        Returns:
          ``(out, feature)``, the feature with the new MLP outputs in it.
        """
        h, c = self._embed(x, t, cond)
        self._check_feature(feature, "module", h)
        pairs = feature.reshape(self.config.depth, 2, *h.shape)
        if self.config.scan_layers:
            graphdef, state = nnx.split(self.blocks)

            def body(h: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
                weights, pair, chosen = layer
                return nnx.merge(graphdef, weights).refresh(h, c, pair, chosen)

            h, kept = jax.lax.scan(body, h, (state, pairs, tokens))
            return self._head(h, c, x.shape), kept.reshape(feature.shape)
        kept = []
        for block, pair, chosen in zip(self.blocks, pairs, tokens):
            h, pair = block.refresh(h, c, pair, chosen)
            kept.append(pair)
        return self._head(h, c, x.shape), jnp.concatenate(kept)

    def module_names(self) -> list[str]:
        """Paths of the ``"module"`` features, in the order of their leading axis."""
        return [f"block{i}/{part}" for i in range(self.config.depth) for part in ("attn", "mlp")]

    def _embed(self, x: jax.Array, t: jax.Array, cond: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        if x.ndim != 4 or x.shape[-1] != config.in_channels:
            raise ValueError(
                f"x: expected [B, height, width, {config.in_channels}], got {x.shape}"
            )
        batch, height, width, channels = x.shape
        p = config.patch_size
        if height % p or width % p:
            raise ValueError(f"x: sides must be multiples of patch_size={p}, got {x.shape}")
        rows, columns = height // p, width // p
        patches = x.reshape(batch, rows, p, columns, p, channels).transpose(0, 1, 3, 2, 4, 5)
        patches = patches.reshape(batch, rows * columns, p * p * channels)
        h = self.patch_embed(patches) + sincos_2d(rows, columns, config.width).astype(config.dtype)
        h = _spread(h, config.token_sharding)
        t = jnp.broadcast_to(jnp.asarray(t, jnp.float32), (batch,))
        c = self.time_embed(t * config.time_scale) + self.class_embed(cond)
        return h, jax.nn.silu(c)

    def _run_blocks(
        self, h: jax.Array, c: jax.Array, *, keep: bool, start: int = 0, stop: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Blocks ``start:stop``; with ``keep`` also their pre-gate outputs."""
        stop = self.config.depth if stop is None else stop
        if start == stop:
            return h, None
        if self.config.scan_layers:
            graphdef, state = nnx.split(self.blocks)
            if (start, stop) != (0, self.config.depth):
                # Read in place: a slice of the stack would copy the weights.
                row = lambda i: nnx.merge(graphdef, jax.tree.map(lambda a: a[i], state))
                step = lambda h, i: (row(i)(h, c)[0], None)
                return jax.lax.scan(step, h, jnp.arange(start, stop))[0], None

            def body(h: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array | None]:
                h, outputs = nnx.merge(graphdef, layer)(h, c)
                return h, outputs if keep else None

            h, outputs = jax.lax.scan(body, h, state)
            return h, outputs.reshape(-1, *h.shape) if keep else None
        kept = []
        for block in list(self.blocks)[start:stop]:
            h, outputs = block(h, c)
            kept.append(outputs)
        return h, jnp.concatenate(kept) if keep else None

    def _run_scored(self, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """All blocks, with their pre-gate outputs and the attention that tokens receive."""
        if self.config.scan_layers:
            graphdef, state = nnx.split(self.blocks)

            def body(h: jax.Array, layer: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
                block = nnx.merge(graphdef, layer)
                after, outputs = block(h, c)
                return after, (outputs, block.attention_received(h, c))

            h, (outputs, received) = jax.lax.scan(body, h, state)
            return h, outputs.reshape(-1, *h.shape), received
        outputs, received = [], []
        for block in self.blocks:
            received.append(block.attention_received(h, c))
            h, pair = block(h, c)
            outputs.append(pair)
        return h, jnp.concatenate(outputs), jnp.stack(received)

    def _gates(self, c: jax.Array) -> jax.Array:
        """All gates ``[2L, B, D]``."""
        if self.config.scan_layers:
            graphdef, state = nnx.split(self.blocks)
            gates = jax.vmap(lambda layer: nnx.merge(graphdef, layer).gates(c))(state)
            return gates.reshape(-1, *c.shape)
        return jnp.concatenate([block.gates(c) for block in self.blocks])

    def _head(self, h: jax.Array, c: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        config = self.config
        shift, scale = jnp.split(self.final_modulation(c), 2, axis=-1)
        out = self.final_linear(modulate(layer_norm(h), shift, scale))
        batch, height, width, _ = shape
        p = config.patch_size
        out = out.reshape(batch, height // p, width // p, p, p, config.out_channels)
        return out.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, config.out_channels)

    def _check_blocks(self, blocks: int) -> int:
        blocks = check_int("blocks", blocks, minimum=0)
        if blocks > self.config.depth:
            raise ValueError(
                f"blocks: must be <= the {self.config.depth} blocks of the model, got {blocks}"
            )
        return blocks

    def _check_feature(self, feature: jax.Array, site: str, h: jax.Array) -> None:
        want = h.shape if site == "crf" else (2 * self.config.depth, *h.shape)
        if feature.shape != want:
            raise ValueError(
                f"feats[{site!r}]: expected shape {want} for this input, got {feature.shape}; "
                "a cache must be rebuilt when the number of tokens changes"
            )


def drop_labels(key: jax.Array, labels: jax.Array, rate: float, null_label: int) -> jax.Array:
    """Replace each label by ``null_label`` with probability ``rate`` (training for guidance)."""
    return jnp.where(jax.random.bernoulli(key, rate, labels.shape), null_label, labels)


def _check_sites(
    sites: Sequence[str], allowed: tuple[str, ...] = ("crf", "module")
) -> None:
    for site in sites:
        check_choice("site", site, allowed)


def _spread(h: jax.Array, sharding: Any) -> jax.Array:
    """``h`` as the configuration lays tokens over devices."""
    return h if sharding is None else jax.lax.with_sharding_constraint(h, sharding)
