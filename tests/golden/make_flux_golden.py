"""Golden outputs of a tiny FluxTransformer2DModel, against which MMDiT is tested.

Run with torch 2.13.0 and diffusers 0.42.1 (``pip install 'fadex-jax[torch]'``)::

    python tests/golden/make_flux_golden.py

writes ``flux_diffusers.npz`` beside this file: a state dict of random weights (modulations and
head included) as ``w:NAME`` in float16, whose values the model held in float32; the inputs
``x, t, txt, pooled, guidance, img_ids, txt_ids`` and the outputs ``out`` (with the guidance
embedding) and ``out_schnell`` (the same weights without it). :func:`bfl_forward` computes the
same function in float64 from the names of black-forest-labs/flux, written for this file from
the formulas of the model; it shares no code with the library and needs NumPy alone.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
WIDTH, HEADS, DOUBLE, SINGLE, CHANNELS, TEXT, POOLED = 16, 2, 2, 2, 16, 12, 10
AXES = (2, 2, 4)
GRID = (2, 3)
TEXT_TOKENS = 5
TIMES = [0.0, 0.137, 0.73, 1.0, 0.5]
# The last is the usual scale of FLUX.1 [dev]: 3500 radians at the highest frequency, where one
# rounding in float32 is worth 2e-4. Torch itself leaves the formula by 3e-6 of the output.
GUIDANCE = [1.0, 0.25, 0.0, 0.5, 3.5]


def diffusers_model(*, guidance: bool = True, seed: int = 0):
    """A tiny model with random weights that float16 can hold, large enough to be visible."""
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=CHANNELS, num_layers=DOUBLE, num_single_layers=SINGLE,
        attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED, guidance_embeds=guidance, axes_dims_rope=AXES,
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            fan_in = value[0].numel() if value.ndim > 1 else 25.0
            # FLUX starts the maps behind its frequencies at 0.02.
            std = 0.02 if "embedder.linear_1.weight" in name else fan_in**-0.5
            draw = std * torch.randn(value.shape, generator=generator)
            is_scale = "norm_" in name and value.ndim == 1 and "norm_out" not in name
            value.copy_((1.0 + draw if is_scale else draw).half())
    return model


def inputs(seed: int) -> dict[str, np.ndarray]:
    """One batch, with positions that are neither zero nor those of a grid for the text."""
    rng = np.random.default_rng(seed)
    batch, tokens = len(TIMES), GRID[0] * GRID[1]
    row, column = np.divmod(np.arange(tokens), GRID[1])
    ids = {"img_ids": np.stack([0 * row, row, column], 1), "txt_ids": rng.integers(0, 9, (5, 3))}
    arrays = {
        "x": rng.standard_normal((batch, tokens, CHANNELS)),
        "t": np.asarray(TIMES),
        "txt": rng.standard_normal((batch, TEXT_TOKENS, TEXT)),
        "pooled": rng.standard_normal((batch, POOLED)),
        "guidance": np.asarray(GUIDANCE),
        **{name: np.broadcast_to(a, (batch, *a.shape)) for name, a in ids.items()},
    }
    return {name: a.astype(np.float32) for name, a in arrays.items()}


def run(model, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Output of the torch model for :func:`inputs`."""
    import torch

    x = {name: torch.from_numpy(a) for name, a in arrays.items()}
    with torch.no_grad():
        return model(
            hidden_states=x["x"], encoder_hidden_states=x["txt"], pooled_projections=x["pooled"],
            timestep=x["t"], img_ids=x["img_ids"][0], txt_ids=x["txt_ids"][0],
            guidance=x["guidance"] if model.config.guidance_embeds else None,
        ).sample.numpy()


def bfl_forward(weights, arrays, *, heads: int = HEADS, axes=AXES) -> np.ndarray:
    """The model from its formulas in float64, with the names of black-forest-labs/flux."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    a = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    linear = lambda name, x: x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
    silu = lambda x: x / (1 + np.exp(-x))

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def embed(name, x):
        return linear(f"{name}.out_layer", silu(linear(f"{name}.in_layer", x)))

    def waves(t):
        angle = 1000 * t[:, None] * 1e4 ** (-np.arange(128) / 128)
        return np.concatenate([np.cos(angle), np.sin(angle)], 1)

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def split_heads(qkv, prefix):
        """Normed q and k, and v: ``[3][B, H, N, Dh]``."""
        q, k, v = np.split(qkv, 3, axis=-1)
        shape = (*q.shape[:2], heads, -1)
        q, k, v = (x.reshape(shape).transpose(0, 2, 1, 3) for x in (q, k, v))
        rms = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return [rms(q) * w[f"{prefix}.query_norm.scale"], rms(k) * w[f"{prefix}.key_norm.scale"], v]

    def rotate(x):
        """Neighbouring pairs as complex numbers, turned by their positions' angles."""
        z = x[..., 0::2] + 1j * x[..., 1::2]
        ids = np.concatenate([a["txt_ids"], a["img_ids"]], 1)
        angles = [ids[..., i, None] * 1e4 ** (-np.arange(0, d, 2) / d) for i, d in enumerate(axes)]
        z = z * np.exp(1j * np.concatenate(angles, -1))[:, None]
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    def attend(q, k, v):
        scores = rotate(q) @ rotate(k).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = scores / scores.sum(-1, keepdims=True) @ v
        return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)

    vec = embed("time_in", waves(a["t"])) + embed("vector_in", a["pooled"])
    if "guidance_in.in_layer.weight" in w:
        vec = vec + embed("guidance_in", waves(a["guidance"]))
    modulation = lambda name, n: np.split(linear(name, silu(vec))[:, None], n, axis=-1)
    h = {"txt": linear("txt_in", a["txt"]), "img": linear("img_in", a["x"])}
    text = h["txt"].shape[1]

    depth = lambda kind: len({name.split(".")[1] for name in w if name.startswith(kind)})
    for i in range(depth("double_blocks")):
        mods, parts = {}, {}
        for s in h:
            name = f"double_blocks.{i}.{s}"
            mods[s] = modulation(f"{name}_mod.lin", 6)
            shift, scale = mods[s][:2]
            qkv = linear(f"{name}_attn.qkv", norm(h[s]) * (1 + scale) + shift)
            parts[s] = split_heads(qkv, f"{name}_attn.norm")
        joint = attend(*(np.concatenate(pair, 2) for pair in zip(parts["txt"], parts["img"])))
        for s, own in (("txt", joint[:, :text]), ("img", joint[:, text:])):
            name, (_, _, gate1, shift, scale, gate2) = f"double_blocks.{i}.{s}", mods[s]
            h[s] = h[s] + gate1 * linear(f"{name}_attn.proj", own)
            hidden = gelu(linear(f"{name}_mlp.0", norm(h[s]) * (1 + scale) + shift))
            h[s] = h[s] + gate2 * linear(f"{name}_mlp.2", hidden)
    x = np.concatenate([h["txt"], h["img"]], 1)
    for i in range(depth("single_blocks")):
        name = f"single_blocks.{i}"
        shift, scale, gate = modulation(f"{name}.modulation.lin", 3)
        mixed = linear(f"{name}.linear1", norm(x) * (1 + scale) + shift)
        qkv, hidden = np.split(mixed, [3 * x.shape[-1]], axis=-1)
        attn = attend(*split_heads(qkv, f"{name}.norm"))
        x = x + gate * linear(f"{name}.linear2", np.concatenate([attn, gelu(hidden)], -1))
    shift, scale = modulation("final_layer.adaLN_modulation.1", 2)
    return linear("final_layer.linear", norm(x[:, text:]) * (1 + scale) + shift)


def without_guidance(weights):
    """The state dict of the model without its guidance embedding."""
    return {k: v for k, v in weights.items() if "guidance" not in k}


def golden_arrays() -> dict[str, np.ndarray]:
    """The content of ``flux_diffusers.npz``."""
    model, schnell = diffusers_model(), diffusers_model(guidance=False)
    schnell.load_state_dict(without_guidance(model.state_dict()))
    arrays = inputs(1)
    weights = {f"w:{k}": v.half().numpy() for k, v in model.state_dict().items()}
    return weights | arrays | {"out": run(model, arrays), "out_schnell": run(schnell, arrays)}


if __name__ == "__main__":
    path = HERE / "flux_diffusers.npz"
    found = golden_arrays()
    np.savez_compressed(path, **found)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(found)} arrays")
