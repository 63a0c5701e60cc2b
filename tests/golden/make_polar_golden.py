"""Golden polar factors of three torch packages, against which ours are tested.

Run with torch 2.13.0, pytorch-optimizer 4.1.0 and gram-newton-schulz 0.1.6::

    python tests/golden/make_polar_golden.py

writes ``polar_peers.npz`` beside this file: inputs ``g0, g1, g2`` and, for each, the outputs
``NAME0, NAME1, NAME2`` of

* ``pytorch_optimizer``: ``zero_power_via_newton_schulz_5`` in float32, 5 steps of Muon's row;
* ``pytorch_optimizer_dion``: the same with the five rows in ``dion``;
* ``torch_muon``: what ``torch.optim.Muon`` applies, in bfloat16, 5 steps of Muon's row;
* ``gram_newton_schulz``: ``GramNewtonSchulz`` without its CUDA kernels, in float16, with its
  own five coefficients in ``gram_coefficients``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SHAPES = [(24, 40), (40, 24), (20, 10)]


def main() -> None:
    import torch
    from gram_newton_schulz import GramNewtonSchulz
    from gram_newton_schulz.coefficients import (
        POLAR_EXPRESS_COEFFICIENTS,
        YOU_COEFFICIENTS,
    )
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5
    from torch.optim._muon import _zeropower_via_newtonschulz

    muon = (3.4445, -4.7750, 2.0315)
    gram = GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
    full = dict(num_steps=5, dtype=torch.float32)
    methods = {
        "pytorch_optimizer": lambda g: zero_power_via_newton_schulz_5(g, weights=muon, **full),
        "pytorch_optimizer_dion": lambda g: zero_power_via_newton_schulz_5(
            g, weights=[tuple(row) for row in YOU_COEFFICIENTS], **full
        ),
        "torch_muon": lambda g: _zeropower_via_newtonschulz(g, muon, 5, 1e-7),
        "gram_newton_schulz": gram,
    }
    rng = np.random.default_rng(0)
    out = {"gram_coefficients": np.array(POLAR_EXPRESS_COEFFICIENTS)}
    out["dion"] = np.array(YOU_COEFFICIENTS)
    for i, shape in enumerate(SHAPES):
        g = rng.normal(size=shape).astype(np.float32)
        out[f"g{i}"] = g
        for name, method in methods.items():
            out[f"{name}{i}"] = method(torch.from_numpy(g.copy())).float().numpy()
    np.savez_compressed(HERE / "polar_peers.npz", **out)


if __name__ == "__main__":
    main()
