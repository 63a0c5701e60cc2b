"""Write scion.npz: fifty steps of pytorch-optimizer's Scion, with exact polar factors.

    pip install torch==2.13.0; pip install --no-deps pytorch-optimizer==4.1.0
    python tests/golden/make_scion_golden.py

Its Newton-Schulz iteration (bfloat16) is replaced by a singular value decomposition in float64,
so that what is compared is the rule and not the iteration. Arrays are stored in torch's layout
(outputs first); the test transposes.
"""

import warnings
from pathlib import Path

import numpy as np
import torch

warnings.filterwarnings("ignore")
from pytorch_optimizer.optimizer import scion as peer  # noqa: E402

SHAPES = {
    "input": (8, 5), "hidden": (6, 8), "conv": (5, 3, 2, 2), "embed": (4, 7), "rows": (6, 4),
    "head": (3, 6), "bias": (6,),
}
NORMS = {
    "input": (peer.LMONorm.SPECTRAL, {"max_scale": True}),
    "hidden": (peer.LMONorm.SPECTRAL, {}),
    "conv": (peer.LMONorm.SPECTRALCONV, {}),
    "embed": (peer.LMONorm.COL, {}),
    "rows": (peer.LMONorm.ROW, {}),
    "head": (peer.LMONorm.SIGN, {}),
    "bias": (peer.LMONorm.BIAS, {}),
}
STEPS, RATE, RADIUS = 50, 0.05, 2.0


def polar(g, *_):
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    return u @ vt


def main():
    peer.zero_power_via_newton_schulz_5 = polar
    rng = np.random.default_rng(0)
    out = {f"start/{k}": rng.standard_normal(s) for k, s in SHAPES.items()}
    grads = {k: rng.standard_normal((STEPS, *s)) for k, s in SHAPES.items()}
    out |= {f"grads/{k}": g for k, g in grads.items()}
    for constraint in (False, True):
        params = {k: torch.nn.Parameter(torch.tensor(out[f"start/{k}"])) for k in SHAPES}
        groups = [{"params": [p], "norm_type": int(NORMS[k][0]), "norm_kwargs": NORMS[k][1],
                   "scale": RADIUS} for k, p in params.items()]
        optimizer = peer.SCION(groups, lr=RATE, momentum=0.1, constraint=constraint)
        for t in range(STEPS):
            for k, p in params.items():
                p.grad = torch.tensor(grads[k][t])
            optimizer.step()
        name = "constrained" if constraint else "unconstrained"
        out |= {f"{name}/{k}": p.detach().numpy() for k, p in params.items()}
    np.savez_compressed(Path(__file__).parent / "scion.npz", **out)


if __name__ == "__main__":
    main()
