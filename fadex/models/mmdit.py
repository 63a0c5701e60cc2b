r"""MMDiT: transformer over an image stream and a text stream, in the form of FLUX.

Sources: Esser et al., "Scaling Rectified Flow Transformers", arXiv 2403.03206 (two streams,
joint attention); black-forest-labs/flux (single-stream blocks, RoPE, guidance embedding).

With :math:`c = \mathrm{silu}(\mathrm{MLP}(\mathrm{freq}(1000t)) + \mathrm{MLP}(\text{pooled})
[+ \mathrm{MLP}(\mathrm{freq}(1000g))])`, a **double block** gives each stream weights of its own
and lets both attend to the concatenation (txt, img): for each stream

.. math::
   (b_1,s_1,g_1,b_2,s_2,g_2) &= \mathrm{Linear}(c), \\
   q, k, v &= \mathrm{Linear}(\mathrm{LN}(h)(1+s_1)+b_1),\quad
     q, k \leftarrow \mathrm{RoPE}(\mathrm{RMSNorm}(q, k)), \\
   h &\mathrel{+}= g_1\,\mathrm{Linear}(\mathrm{Attn}(q,
     [k_\text{txt}, k_\text{img}], [v_\text{txt}, v_\text{img}])), \\
   h &\mathrel{+}= g_2\,\mathrm{MLP}(\mathrm{LN}(h)(1+s_2)+b_2).

A **single block** runs both on the concatenation with one set of weights, attention beside MLP:

.. math::
   (b,s,g) = \mathrm{Linear}(c),\quad
   [q, k, v, m] = \mathrm{Linear}(\mathrm{LN}(h)(1+s)+b),\quad
   h \mathrel{+}= g\,\mathrm{Linear}([\mathrm{Attn}(q,k,v), \mathrm{gelu}(m)]).

The modulations and the output projection start at zero, so an untrained model predicts exactly
zero.

Sites for feature caching (``with_features`` / ``from_features``):

* ``"crf"``: what all blocks add to the image stream, ``[B, Ni, D]``;
* ``"module"``: every output before its gate, on (txt, img): ``[2 Ld + Ls, B, Nt + Ni, D]`` in the
  order ``double0/attn, double0/mlp, ..., single0, ...``. The gates come from the current time,
  also at skipped steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fadex.core.checks import check_choice, check_int, check_real
from fadex.models.kernels import gated_forecast
from fadex.models.layers import (
    Linear,
    Mlp,
    RMSNorm,
    TimestepEmbedding,
    VectorEmbedding,
    attend,
    layer_norm,
    modulate,
)
from fadex.models.rope import apply_rope, image_ids, rope_table

_GUIDANCE_SCALE = 1000.0  # distilled guidance is embedded like a time in [0, 1]
_COND_KEYS = ("txt", "pooled", "guidance", "img_ids", "txt_ids")

Cond = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class MMDiTConfig:
    """Static description of an :class:`MMDiT`; the defaults are those of FLUX.1 [schnell].

    Attributes:
      patch_size: side of the square of pixels that makes a token of image-shaped input.
      in_channels: channels of a token: ``patch_size^2`` times those of the latents.
      out_channels: channels of an output token; those of the input by default.
      double_depth, single_depth: ``Ld`` double blocks, then ``Ls`` single blocks.
      width, num_heads: ``D``, ``H``.
      mlp_ratio: hidden width of the MLPs over ``width``.
      text_width, pooled_width: channels of the text tokens and of the pooled text vector.
      guidance_embed: take a distilled guidance scale as a condition.
      rope_axes: sizes of the position axes (frame, row, column) within a head; their sum is
        ``width / num_heads``.
      rope_theta: base of the frequencies of the positions.
      time_scale: factor on ``t`` before its embedding; 1000 for flow matching on ``[0, 1]``.
      scan_layers: stack the blocks of each kind on a leading axis and run them under
        ``lax.scan``: compile time of the full pass no longer grows with depth.
      dtype, param_dtype: of products and of parameters.
    """

    patch_size: int = 2
    in_channels: int = 64
    out_channels: int | None = None
    double_depth: int = 19
    single_depth: int = 38
    width: int = 3072
    num_heads: int = 24
    mlp_ratio: float = 4.0
    text_width: int = 4096
    pooled_width: int = 768
    guidance_embed: bool = False
    rope_axes: tuple[int, int, int] = (16, 56, 56)
    rope_theta: float = 1e4
    time_scale: float = 1000.0
    scan_layers: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        for name in ("patch_size", "in_channels", "double_depth", "single_depth", "width",
                     "num_heads", "text_width", "pooled_width"):
            check_int(name, getattr(self, name), minimum=1)
        check_real("mlp_ratio", self.mlp_ratio, minimum=0.0, exclusive=True)
        check_real("rope_theta", self.rope_theta, minimum=0.0, exclusive=True)
        for name in ("in_channels", "out_channels"):
            channels = getattr(self, name)
            if channels is not None and check_int(name, channels, minimum=1) % self.patch_size**2:
                raise ValueError(
                    f"{name}: channels of a token, expected a multiple of patch_size^2="
                    f"{self.patch_size**2}, got {channels}"
                )
        if self.width % self.num_heads:
            raise ValueError(f"num_heads: must divide width={self.width}, got {self.num_heads}")
        object.__setattr__(self, "rope_axes", tuple(self.rope_axes))
        even = all(check_int("rope_axes", size, minimum=0) % 2 == 0 for size in self.rope_axes)
        if len(self.rope_axes) != 3 or not even or sum(self.rope_axes) != self.head_width:
            raise ValueError(
                f"rope_axes: expected three even sizes that sum to width / num_heads = "
                f"{self.head_width}, got {self.rope_axes}"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs."""
        return int(self.width * self.mlp_ratio)

    @property
    def token_outputs(self) -> int:
        """Channels of an output token."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @classmethod
    def flux(cls, **overrides: Any) -> MMDiTConfig:
        """FLUX.1: width 3072, 19 double and 38 single blocks, 11.9 billion parameters.

        With the guidance embedding of [dev]; ``guidance_embed=False`` gives [schnell].

        Example:
          >>> from fadex.models import MMDiTConfig
          >>> config = MMDiTConfig.flux(scan_layers=True)
          >>> config.head_width, config.guidance_embed
          (128, True)
        """
        return cls(**{"guidance_embed": True, **overrides})


class _Heads(NamedTuple):
    """Queries, keys and values, ``[B, N, H, Dh]`` each."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _attend(heads: _Heads, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention with rotated queries and keys, ``[B, N, D]``."""
    q, k = (apply_rope(x, *rope) for x in heads[:2])
    out = attend(q, k, heads.v)
    return out.reshape(*out.shape[:2], -1)


class _HeadNorms(nnx.Module):
    """``[B, N, 3 D]`` to heads, with RMS norms over the queries and keys of each head."""

    def __init__(self, config: MMDiTConfig):
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype)
        self.query = RMSNorm(config.head_width, **kwargs)
        self.key = RMSNorm(config.head_width, **kwargs)

    def __call__(self, qkv: jax.Array) -> _Heads:
        width = self.query.scale.shape[-1]
        q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, -1, width), 2, 0)
        return _Heads(self.query(q), self.key(k), v)


class MMDiTStream(nnx.Module):
    """The weights of one stream in a double block."""

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs):
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        width = config.width
        self.modulation = Linear(width, 6 * width, kernel_init=nnx.initializers.zeros, **kwargs)
        self.qkv = Linear(width, 3 * width, **kwargs)
        self.norm = _HeadNorms(config)
        self.proj = Linear(width, width, **kwargs)
        self.mlp = Mlp(width, config.hidden, **kwargs)

    def attention_input(self, h: jax.Array, shift: jax.Array, scale: jax.Array) -> _Heads:
        return self.norm(self.qkv(modulate(layer_norm(h), shift, scale)))

    def gates(self, c: jax.Array) -> jax.Array:
        """``(g1, g2)`` as ``[2, B, D]``."""
        width, columns = c.shape[-1], self.modulation.columns
        return jnp.stack([columns(c, 2 * width, 3 * width), columns(c, 5 * width, 6 * width)])


class MMDiTDoubleBlock(nnx.Module):
    """Two streams with weights of their own and joint attention."""

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs):
        self.img = MMDiTStream(config, rngs=rngs)
        self.txt = MMDiTStream(config, rngs=rngs)

    def __call__(
        self, txt: jax.Array, img: jax.Array, c: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """New ``txt`` and ``img``, and the pre-gate outputs ``[2, B, Nt + Ni, D]``."""
        parts = [(self.txt, txt), (self.img, img)]
        signals = [jnp.split(stream.modulation(c), 6, axis=-1) for stream, _ in parts]
        heads = [stream.attention_input(h, *m[:2]) for (stream, h), m in zip(parts, signals)]
        joint = _attend(_Heads(*(jnp.concatenate(pair, axis=1) for pair in zip(*heads))), rope)
        joint = joint[:, : txt.shape[1]], joint[:, txt.shape[1] :]
        hidden, attns, mlps = [], [], []
        for (stream, h), attn, (_, _, g1, b2, s2, g2) in zip(parts, joint, signals):
            attns.append(stream.proj(attn))
            h = h + g1[:, None] * attns[-1]
            mlps.append(stream.mlp(modulate(layer_norm(h), b2, s2)))
            hidden.append(h + g2[:, None] * mlps[-1])
        outputs = [jnp.concatenate(pair, axis=1) for pair in (attns, mlps)]
        return *hidden, jnp.stack(outputs)

    def gates(self, c: jax.Array) -> jax.Array:
        """Of the image stream, ``[2, B, D]``."""
        return self.img.gates(c)


class MMDiTSingleBlock(nnx.Module):
    """One set of weights for both streams, attention and MLP side by side."""

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs):
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        width = config.width
        self.modulation = Linear(width, 3 * width, kernel_init=nnx.initializers.zeros, **kwargs)
        self.linear1 = Linear(width, 3 * width + config.hidden, **kwargs)
        self.norm = _HeadNorms(config)
        self.linear2 = Linear(width + config.hidden, width, **kwargs)

    def __call__(
        self, h: jax.Array, c: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """New ``h`` ``[B, Nt + Ni, D]``, and the pre-gate output of that shape."""
        shift, scale, gate = jnp.split(self.modulation(c), 3, axis=-1)
        mixed = self.linear1(modulate(layer_norm(h), shift, scale))
        qkv, mlp = jnp.split(mixed, [3 * h.shape[-1]], axis=-1)
        attn = _attend(self.norm(qkv), rope)
        out = self.linear2(jnp.concatenate([attn, jax.nn.gelu(mlp, approximate=True)], axis=-1))
        return h + gate[:, None] * out, out

    def gates(self, c: jax.Array) -> jax.Array:
        """``[1, B, D]``."""
        return self.modulation.columns(c, 2 * c.shape[-1], 3 * c.shape[-1])[None]


class _Embedded(NamedTuple):
    """The inputs as the blocks see them."""

    txt: jax.Array  # [B, Nt, D]
    img: jax.Array  # [B, Ni, D]
    c: jax.Array  # [B, D]
    rope: tuple[jax.Array, jax.Array]  # [B or 1, Nt + Ni, Dh / 2] each
    grid: tuple[int, int] | None  # rows and columns of tokens, for image-shaped input


class MMDiT(nnx.Module):
    """Image-and-text diffusion transformer, called as ``model(x, t, cond)``.

    Args of the call:
      x: latents ``[B, height, width, in_channels / patch_size^2]``, packed into tokens of
        ``patch_size^2`` pixels in FLUX's order (channel, row, column), square or not; or tokens
        ``[B, Ni, in_channels]``, whose positions ``cond["img_ids"]`` must then give.
      t: times ``[B]`` or a scalar, float32, noise at 1.
      cond: a dictionary of

        * ``"txt"``: text features ``[B, Nt, text_width]``,
        * ``"pooled"``: a vector for the whole text ``[B, pooled_width]``,
        * ``"guidance"``: ``[B]``, required if and only if ``config.guidance_embed``; a condition
          like the others: a distilled scale (3.5, say), not classifier-free guidance,
        * ``"img_ids"``: positions ``[B, Ni, 3]`` (frame, row, column); for image-shaped input
          (0, row, column) by default,
        * ``"txt_ids"``: positions ``[B, Nt, 3]``, zero by default.

    Returns the velocity, shaped like ``x``.

    Raises:
      ValueError: inputs of the wrong shape, or a missing or unknown entry of ``cond``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fadex.models import MMDiT, MMDiTConfig
      >>> config = MMDiTConfig(double_depth=1, single_depth=1, width=32, num_heads=2, in_channels=4,
      ...                      text_width=8, pooled_width=8, rope_axes=(4, 6, 6))
      >>> model = MMDiT(config, rngs=nnx.Rngs(0))
      >>> cond = {"txt": jnp.ones((3, 5, 8)), "pooled": jnp.ones((3, 8))}
      >>> model(jnp.ones((3, 4, 6, 1)), 0.5, cond).shape
      (3, 4, 6, 1)
    """

    def __init__(self, config: MMDiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        kwargs = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        zeros = nnx.initializers.zeros
        width = config.width
        self.img_in = Linear(config.in_channels, width, **kwargs)
        self.txt_in = Linear(config.text_width, width, **kwargs)
        self.time_embed = TimestepEmbedding(width, **kwargs)
        self.guidance_embed = TimestepEmbedding(width, **kwargs) if config.guidance_embed else None
        self.pooled_embed = VectorEmbedding(config.pooled_width, width, **kwargs)
        self.double_blocks = _blocks(MMDiTDoubleBlock, config, config.double_depth, rngs)
        self.single_blocks = _blocks(MMDiTSingleBlock, config, config.single_depth, rngs)
        self.final_modulation = Linear(width, 2 * width, kernel_init=zeros, **kwargs)
        self.final_linear = Linear(width, config.token_outputs, kernel_init=zeros, **kwargs)

    def __call__(self, x: jax.Array, t: jax.Array, cond: Cond) -> jax.Array:
        inputs = self._embed(x, t, cond)
        _, img, _ = self._run_blocks(inputs, keep=False)
        return self._head(img, inputs)

    def with_features(
        self, x: jax.Array, t: jax.Array, cond: Cond, sites: Sequence[str]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The full pass, with the features at ``sites`` (any of ``"crf"``, ``"module"``)."""
        _check_sites(sites)
        inputs = self._embed(x, t, cond)
        _, img, modules = self._run_blocks(inputs, keep="module" in sites)
        found = {"crf": img - inputs.img, "module": modules}
        return self._head(img, inputs), {site: found[site] for site in sites}

    def from_features(
        self, x: jax.Array, t: jax.Array, cond: Cond, feats: dict[str, jax.Array]
    ) -> jax.Array:
        """The cheap pass: embeddings, gates and head around the given features."""
        (site,) = feats
        _check_sites([site])
        inputs = self._embed(x, t, cond)
        self._check_feature(feats[site], site, inputs)
        img = inputs.img
        if site == "crf":
            img = img + feats["crf"].astype(img.dtype)
        else:
            # The head reads the image alone, so the text rows play no part here.
            outputs = feats["module"][:, :, inputs.txt.shape[1] :].astype(img.dtype)
            for gate, output in zip(self._gates(inputs.c), outputs):
                img = img + gate[:, None] * output
        return self._head(img, inputs)

    def from_history(
        self, x: jax.Array, t: jax.Array, cond: Cond, weights: jax.Array, history: jax.Array
    ) -> jax.Array:
        """:meth:`from_features` at ``"module"`` from ``K`` snapshots and their weights.

        Each forecast is formed where it is gated (one fused pass over the cache), never
        written to memory. ``weights``: ``[2 Ld + Ls, K]``, ``history``: ``[K, 2 Ld + Ls, B,
        Nt + Ni, D]``. The text rows ride along, since cutting them off would copy the cache.
        """
        inputs = self._embed(x, t, cond)
        self._check_feature(history[0], "module", inputs)
        text = inputs.txt.shape[1]
        h = jnp.pad(inputs.img, ((0, 0), (text, 0), (0, 0)))
        for i, gate in enumerate(self._gates(inputs.c)):
            h = gated_forecast(h, gate, weights, history, site=i)
        return self._head(h[:, text:], inputs)

    def begin(
        self, x: jax.Array, t: jax.Array, cond: Cond, blocks: int
    ) -> dict[str, jax.Array]:
        """Embeddings and the first ``blocks`` double blocks: ``{"txt", "img"}``."""
        inputs = self._embed(x, t, cond)
        txt, img, _ = self._run_double(inputs, 0, self._check_blocks(blocks))
        return {"txt": txt, "img": img}

    def finish(
        self, x: jax.Array, t: jax.Array, cond: Cond, hidden: Mapping[str, jax.Array], blocks: int
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The blocks after the first ``blocks`` and the head; what they added, as ``hidden``."""
        inputs = self._embed(x, t, cond)._replace(txt=hidden["txt"], img=hidden["img"])
        txt, img, _ = self._run_blocks(inputs, keep=False, start=self._check_blocks(blocks))
        residual = {"txt": txt - hidden["txt"], "img": img - hidden["img"]}
        return self._head(img, inputs), residual

    def resume(
        self,
        x: jax.Array,
        t: jax.Array,
        cond: Cond,
        hidden: Mapping[str, jax.Array],
        residual: Mapping[str, jax.Array],
    ) -> jax.Array:
        """The head of ``hidden + residual``, which reads the image stream alone."""
        inputs = self._embed(x, t, cond)
        img = hidden["img"] + residual["img"].astype(hidden["img"].dtype)
        return self._head(img, inputs)

    def modulated(self, x: jax.Array, t: jax.Array, cond: Cond) -> jax.Array:
        """The modulated image input of the first double block ``[B, Ni, D]``."""
        inputs = self._embed(x, t, cond)
        block = self.double_blocks
        if self.config.scan_layers:
            graphdef, state = nnx.split(block)
            block = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], state))
        else:
            block = block[0]
        signals = block.img.modulation.columns(inputs.c, 0, 2 * self.config.width)
        return modulate(layer_norm(inputs.img), *jnp.split(signals, 2, axis=-1))

    def module_names(self) -> list[str]:
        """Paths of the ``"module"`` features, in the order of their leading axis."""
        config = self.config
        double = [f"double{i}/{part}" for i in range(config.double_depth)
                  for part in ("attn", "mlp")]
        return double + [f"single{i}" for i in range(config.single_depth)]

    def _embed(self, x: jax.Array, t: jax.Array, cond: Cond) -> _Embedded:
        config = self.config
        tokens, grid = self._pack(x)
        batch = tokens.shape[0]
        self._check_cond(cond, batch, tokens.shape[1], grid)
        t = jnp.broadcast_to(jnp.asarray(t, jnp.float32), (batch,))
        c = self.time_embed(t * config.time_scale) + self.pooled_embed(cond["pooled"])
        if self.guidance_embed is not None:
            guidance = jnp.asarray(cond["guidance"], jnp.float32)
            c = c + self.guidance_embed(guidance * _GUIDANCE_SCALE)
        txt_ids = cond.get("txt_ids")
        if txt_ids is None:
            txt_ids = image_ids(1, 1)[None].repeat(cond["txt"].shape[1], axis=1)
        img_ids = cond.get("img_ids")
        if img_ids is None:
            img_ids = image_ids(*grid)[None]
        tables = [rope_table(ids, config.rope_axes, config.rope_theta)
                  for ids in (txt_ids, img_ids)]
        rows = max(ids.shape[0] for ids in (txt_ids, img_ids))
        rope = tuple(
            jnp.concatenate([jnp.broadcast_to(a, (rows, *a.shape[1:])) for a in pair], axis=1)
            for pair in zip(*tables)
        )
        return _Embedded(
            self.txt_in(cond["txt"]), self.img_in(tokens), jax.nn.silu(c), rope, grid
        )

    def _pack(self, x: jax.Array) -> tuple[jax.Array, tuple[int, int] | None]:
        """Tokens ``[B, Ni, in_channels]``, and their grid when ``x`` is an image."""
        config = self.config
        p = config.patch_size
        channels = config.in_channels // p**2
        if x.ndim == 3 and x.shape[-1] == config.in_channels:
            return x, None
        if x.ndim != 4 or x.shape[-1] != channels:
            raise ValueError(
                f"x: expected an image [B, height, width, {channels}] or tokens [B, N, "
                f"{config.in_channels}], got {x.shape}"
            )
        batch, height, width, _ = x.shape
        if height % p or width % p:
            raise ValueError(f"x: sides must be multiples of patch_size={p}, got {x.shape}")
        grid = (height // p, width // p)
        x = x.reshape(batch, grid[0], p, grid[1], p, channels).transpose(0, 1, 3, 5, 2, 4)
        return x.reshape(batch, grid[0] * grid[1], config.in_channels), grid

    def _check_cond(
        self, cond: Any, batch: int, tokens: int, grid: tuple[int, int] | None
    ) -> None:
        config = self.config
        if not isinstance(cond, Mapping):
            raise ValueError(
                f"cond: expected a dictionary with 'txt' and 'pooled', got {type(cond).__name__}"
            )
        unknown = [key for key in cond if key not in _COND_KEYS]
        if unknown:
            raise ValueError(
                f"cond: expected entries among {', '.join(map(repr, _COND_KEYS))}, got {unknown}"
            )
        required = ["txt", "pooled"] + ["guidance"] * config.guidance_embed
        for key in required:
            if cond.get(key) is None:
                raise ValueError(f"cond[{key!r}]: required by this model")
        if cond.get("guidance") is not None and not config.guidance_embed:
            raise ValueError("cond['guidance']: this model has no guidance embedding")
        if grid is None and cond.get("img_ids") is None:
            raise ValueError(
                "cond['img_ids']: required when x is a sequence of tokens, which shows no rows "
                f"and columns; expected positions of shape ({batch}, {tokens}, 3)"
            )
        text = jnp.shape(cond["txt"])[1] if jnp.ndim(cond["txt"]) == 3 else -1
        shapes = {
            "txt": (batch, text, config.text_width),
            "pooled": (batch, config.pooled_width),
            "guidance": (batch,),
            "img_ids": (batch, tokens, 3),
            "txt_ids": (batch, text, 3),
        }
        for key, want in shapes.items():
            if cond.get(key) is not None and jnp.shape(cond[key]) != want:
                want = str(want).replace("-1", "N")
                raise ValueError(
                    f"cond[{key!r}]: expected shape {want}, got {jnp.shape(cond[key])}"
                )

    def _run_double(
        self, inputs: _Embedded, start: int, stop: int, *, keep: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        def step(carry: tuple[jax.Array, jax.Array], block: MMDiTDoubleBlock):
            *carry, outputs = block(*carry, inputs.c, inputs.rope)
            return tuple(carry), outputs if keep else None

        (txt, img), kept = _fold(step, (inputs.txt, inputs.img), self.double_blocks, start, stop)
        return txt, img, kept

    def _run_blocks(
        self, inputs: _Embedded, *, keep: bool, start: int = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Text and image behind all blocks, and the modules' outputs if they are kept."""
        config = self.config
        txt, img, double = self._run_double(inputs, start, config.double_depth, keep=keep)

        def step(h: jax.Array, block: MMDiTSingleBlock):
            h, output = block(h, inputs.c, inputs.rope)
            return h, output if keep else None

        h = jnp.concatenate([txt, img], axis=1)
        h, single = _fold(step, h, self.single_blocks, 0, config.single_depth)
        txt, img = h[:, : txt.shape[1]], h[:, txt.shape[1] :]
        if not keep:
            return txt, img, None
        return txt, img, jnp.concatenate([double.reshape(-1, *h.shape), single])

    def _gates(self, c: jax.Array) -> jax.Array:
        """The gates of the image rows, ``[2 Ld + Ls, B, D]``."""
        gates = []
        for blocks in (self.double_blocks, self.single_blocks):
            if self.config.scan_layers:
                graphdef, state = nnx.split(blocks)
                of_layer = lambda layer, graphdef=graphdef: nnx.merge(graphdef, layer).gates(c)
                gates.append(jax.vmap(of_layer)(state).reshape(-1, *c.shape))
            else:
                gates += [block.gates(c) for block in blocks]
        return jnp.concatenate(gates)

    def _head(self, img: jax.Array, inputs: _Embedded) -> jax.Array:
        shift, scale = jnp.split(self.final_modulation(inputs.c), 2, axis=-1)
        out = self.final_linear(modulate(layer_norm(img), shift, scale))
        if inputs.grid is None:
            return out
        p, (rows, columns) = self.config.patch_size, inputs.grid
        out = out.reshape(out.shape[0], rows, columns, -1, p, p).transpose(0, 1, 4, 2, 5, 3)
        return out.reshape(out.shape[0], rows * p, columns * p, -1)

    def _check_blocks(self, blocks: int) -> int:
        if check_int("blocks", blocks, minimum=0) > self.config.double_depth:
            raise ValueError(
                f"blocks: must be <= the {self.config.double_depth} double blocks, got {blocks}"
            )
        return blocks

    def _check_feature(self, feature: jax.Array, site: str, inputs: _Embedded) -> None:
        config, (batch, tokens, width) = self.config, inputs.img.shape
        want = (batch, tokens, width)
        if site == "module":
            modules = 2 * config.double_depth + config.single_depth
            want = (modules, batch, inputs.txt.shape[1] + tokens, width)
        if feature.shape != want:
            raise ValueError(
                f"feats[{site!r}]: expected shape {want} for this input, got {feature.shape}; "
                "a cache must be rebuilt when the number of tokens changes"
            )


def _blocks(kind: type[nnx.Module], config: MMDiTConfig, depth: int, rngs: nnx.Rngs) -> Any:
    """A list of blocks, or one block whose parameters are stacked."""
    blocks = [kind(config, rngs=rngs) for _ in range(depth)]
    if not config.scan_layers:
        return nnx.List(blocks)
    states = [nnx.state(block) for block in blocks]
    return nnx.merge(nnx.split(blocks[0])[0], jax.tree.map(lambda *a: jnp.stack(a), *states))


def _fold(step: Any, carry: Any, blocks: Any, start: int, stop: int) -> tuple[Any, Any]:
    """``step(carry, block) -> (carry, kept)`` over blocks ``start:stop``, kept ones stacked."""
    if isinstance(blocks, nnx.List):
        kept = []
        for block in list(blocks)[start:stop]:
            carry, outputs = step(carry, block)
            kept.append(outputs)
        return carry, jnp.stack(kept) if kept and kept[0] is not None else None
    graphdef, state = nnx.split(blocks)
    if (start, stop) == (0, jax.tree.leaves(state)[0].shape[0]):
        return jax.lax.scan(lambda c, layer: step(c, nnx.merge(graphdef, layer)), carry, state)
    # Read in place: a slice of the stack would copy the weights.
    row = lambda i: nnx.merge(graphdef, jax.tree.map(lambda a: a[i], state))
    return jax.lax.scan(lambda c, i: step(c, row(i)), carry, jnp.arange(start, stop))


def _check_sites(sites: Sequence[str]) -> None:
    for site in sites:
        check_choice("site", site, ("crf", "module"))
