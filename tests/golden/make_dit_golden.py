"""Golden outputs of two torch DiTs, against which the weight conversion is tested.

Run with torch 2.13.0 and diffusers 0.42.1 (``pip install 'fadex-jax[torch]'``)::

    python tests/golden/make_dit_golden.py

writes ``dit_diffusers.npz`` and ``dit_facebook.npz`` beside this file. Each holds a state
dict of random weights (adaLN and head included, which are zero in a new model) as
``w:NAME``, the inputs ``x0, t0, y0, x1, ...`` (latents in torch's ``[B, C, H, W]``) and the
outputs ``out0, out1, ...``.

* ``dit_diffusers.npz``: ``DiTTransformer2DModel`` itself, with ``norm_eps=1e-6``.
  ``out_default_eps`` is the output for ``x0`` with its default ``norm_eps=1e-5``.
* ``dit_facebook.npz``: :class:`ReferenceDiT`, written for this file after the paper
  (arXiv 2212.09748) with the parameter names of facebookresearch/DiT. It shares no code with
  the library, computes in float64 and takes non-square inputs.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
WIDTH, HEADS, DEPTH, PATCH, CHANNELS, CLASSES = 32, 2, 2, 2, 4, 11
TIMES = [0.0, 7.0, 251.0, 999.0]
LABELS = [0, 3, 10, 11]  # 11 is the null label


def randomize(module, seed: int) -> None:
    """Random weights of a size that keeps every branch of the model visible in the output."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            fan_in = value[0].numel() if value.ndim > 1 else 25.0
            scale = 1.0 if "embedding_table" in name else fan_in**-0.5
            value.copy_(scale * torch.randn(value.shape, generator=generator, dtype=value.dtype))


def inputs(shape: tuple[int, int], seed: int):
    """Latents, times and labels of one batch."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(TIMES), CHANNELS, *shape, generator=generator)
    return x, torch.tensor(TIMES), torch.tensor(LABELS)


def diffusers_model(*, norm_eps: float = 1e-6, seed: int = 0):
    """A tiny ``DiTTransformer2DModel``, all blocks with the embedders of block 0."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=CHANNELS,
        out_channels=2 * CHANNELS, num_layers=DEPTH, sample_size=8, patch_size=PATCH,
        num_embeds_ada_norm=CLASSES, norm_eps=norm_eps,
    ).eval()
    randomize(model, seed)
    first, *others = model.transformer_blocks
    for block in others:
        block.norm1.emb.load_state_dict(first.norm1.emb.state_dict())
    return model


def reference_model(*, seed: int = 1):
    """A tiny :class:`ReferenceDiT` in float64 whose weights are float32 numbers."""
    model = _reference_class()().float()
    randomize(model, seed)
    return model.double().eval()


def _reference_class():
    import torch
    from torch import nn

    class ReferenceDiT(nn.Module):
        """DiT as its paper describes it, one formula a line."""

        def __init__(self):
            super().__init__()
            D = WIDTH
            self.x_embedder = nn.Module()
            self.x_embedder.proj = nn.Conv2d(CHANNELS, D, PATCH, stride=PATCH)
            self.t_embedder = nn.Module()
            self.t_embedder.mlp = nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))
            self.y_embedder = nn.Module()
            self.y_embedder.embedding_table = nn.Embedding(CLASSES + 1, D)
            self.register_buffer("pos_embed", positions(4, 4)[None].float())
            self.blocks = nn.ModuleList()
            for _ in range(DEPTH):
                block = nn.Module()
                block.attn = nn.Module()
                block.attn.qkv, block.attn.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
                block.mlp = nn.Module()
                block.mlp.fc1, block.mlp.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
                block.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))
                self.blocks.append(block)
            self.final_layer = nn.Module()
            self.final_layer.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
            self.final_layer.linear = nn.Linear(D, PATCH * PATCH * 2 * CHANNELS)

        def forward(self, x, t, y):
            batch, _, height, width = x.shape
            rows, columns = height // PATCH, width // PATCH
            h = self.x_embedder.proj(x).reshape(batch, WIDTH, rows * columns).mT
            h = h + positions(rows, columns)

            frequency = torch.tensor([1e4 ** (-i / 128) for i in range(128)]).double()
            angle = t.double()[:, None] * frequency
            embedded = self.t_embedder.mlp(torch.cat([angle.cos(), angle.sin()], 1))
            c = embedded + self.y_embedder.embedding_table(y)

            for block in self.blocks:
                modulation = block.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
                shift1, scale1, gate1, shift2, scale2, gate2 = modulation
                h = h + gate1 * self.attend(block.attn, norm(h) * (1 + scale1) + shift1)
                u = block.mlp.fc1(norm(h) * (1 + scale2) + shift2)
                cubic = math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)
                h = h + gate2 * block.mlp.fc2(0.5 * u * (1 + torch.tanh(cubic)))

            shift, scale = self.final_layer.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
            tokens = self.final_layer.linear(norm(h) * (1 + scale) + shift)
            out = torch.zeros(batch, 2 * CHANNELS, height, width, dtype=h.dtype)
            for r in range(rows):
                for s in range(columns):
                    tile = tokens[:, r * columns + s].reshape(batch, PATCH, PATCH, 2 * CHANNELS)
                    window = slice(r * PATCH, (r + 1) * PATCH), slice(s * PATCH, (s + 1) * PATCH)
                    out[:, :, window[0], window[1]] = tile.permute(0, 3, 1, 2)
            return out

        def attend(self, attn, x):
            size = WIDTH // HEADS
            q, k, v = attn.qkv(x).split(WIDTH, dim=-1)
            heads = []
            for i in range(HEADS):
                part = slice(i * size, (i + 1) * size)
                scores = q[..., part] @ k[..., part].mT / math.sqrt(size)
                heads.append(scores.softmax(-1) @ v[..., part])
            return attn.proj(torch.cat(heads, -1))

    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def positions(rows, columns):
        """Sines and cosines of the column, then of the row."""
        frequency = [1e4 ** (-4 * i / WIDTH) for i in range(WIDTH // 4)]
        table = []
        for r in range(rows):
            for s in range(columns):
                parts = [fn(p * w) for p in (s, r) for fn in (math.sin, math.cos)
                         for w in frequency]
                table.append(parts)
        return torch.tensor(table).double()

    return ReferenceDiT


def run(model, batches, double: bool = False) -> dict[str, np.ndarray]:
    """Weights, inputs and outputs of a model under the names of the golden files."""
    import torch

    arrays = {f"w:{k}": v.float().numpy() for k, v in model.state_dict().items()}
    for i, (x, t, y) in enumerate(batches):
        with torch.no_grad():
            out = model(x.double() if double else x, t, y)
        out = getattr(out, "sample", out)
        arrays |= {f"x{i}": x.numpy(), f"t{i}": t.numpy(), f"y{i}": y.numpy().astype(np.int32),
                   f"out{i}": out.float().numpy()}
    return arrays


def diffusers_arrays() -> dict[str, np.ndarray]:
    """The content of ``dit_diffusers.npz``."""
    arrays = run(diffusers_model(), [inputs((8, 8), 2)])
    loose = run(diffusers_model(norm_eps=1e-5), [inputs((8, 8), 2)])
    return arrays | {"out_default_eps": loose["out0"]}


def facebook_arrays() -> dict[str, np.ndarray]:
    """The content of ``dit_facebook.npz``: a square batch and two that are not."""
    batches = [inputs(shape, 3 + i) for i, shape in enumerate([(8, 8), (4, 12), (6, 2)])]
    return run(reference_model(), batches, double=True)


if __name__ == "__main__":
    for name, arrays in (("diffusers", diffusers_arrays()), ("facebook", facebook_arrays())):
        path = HERE / f"dit_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(arrays)} arrays")
