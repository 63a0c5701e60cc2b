"""Reuse: the newest computed feature stands for every skipped one."""

from __future__ import annotations

import numpy as np

from fadex.caching.plan import WeightRule


def _weights(pos: tuple[int, ...], s: int) -> np.ndarray:
    del s
    return np.eye(len(pos))[0]


def reuse() -> WeightRule:
    r""":math:`\hat F(s) = F(a_0)`.

    At the site ``"module"`` this is FORA (arXiv 2407.01425); at ``"crf"`` it is the idea of
    DeepCache (arXiv 2312.00858) for a transformer.
    """
    return WeightRule("reuse", 1, _weights)
