r"""FoCa: forecast by a local slope, then calibrate by the trapezoidal rule.

Source: "Forecast then Calibrate: Feature Caching as ODE for Efficient Diffusion
Transformers", arXiv 2508.16211; the recursion as published in a public implementation,
with slopes taken per step. From the last anchor ``a_0``, with the last two known values
(computed or forecast) at ``q_0 > q_1``,

.. math:: \hat F(s) = F(a_0) + \frac{s - a_0}{2} \Big( \frac{F(a_0) - F(a_1)}{a_0 - a_1}
   + \frac{F(q_0) - F(q_1)}{q_0 - q_1} \Big).

Variants:

* ``"anchored"``: each segment starts from the two newest anchors. Both slopes then agree
  and the method is Taylor of order 1;
* ``"rolling"``: a forecast of the previous segment stays in the window, so that right after
  an anchor the local slope is the jump from the last forecast to the computed value;
* ``"cache_dit"``: as ``"rolling"``, but neither slope is divided by its spacing, and past
  three steps the forecast is pulled back to the anchor, as the public implementation does.

The last two look back without end; here the recursion starts at the oldest of six anchors.
"""

from __future__ import annotations

import functools

import numpy as np

from fadex.caching.plan import WeightRule
from fadex.core.checks import check_choice

_HORIZON = 3.0


def _weights(pos: tuple[int, ...], s: int, *, variant: str) -> np.ndarray:
    units = np.eye(len(pos))
    if len(pos) == 1:
        return units[0]
    if variant == "anchored":
        slope = (units[0] - units[1]) / (pos[0] - pos[1])
        return units[0] + (s - pos[0]) * slope
    divide = variant == "rolling"
    # Replay from the oldest anchor on: (step, value) of the last two known values.
    window = [(pos[-1], units[-1])]
    value = units[-1]
    ends = [a - 1 for a in pos[-2::-1]] + [s]
    for j, end in zip(range(len(pos) - 1, -1, -1), ends):
        anchor = pos[j]
        if j < len(pos) - 1:
            window = [*window, (anchor, units[j])][-2:]
        if j == len(pos) - 1:  # only one anchor is known: reuse, and nothing enters the window
            continue
        full = (units[j] - units[j + 1]) / (pos[j] - pos[j + 1] if divide else 1)
        for q in range(anchor + 1, end + 1):
            (q1, f1), (q0, f0) = window
            local = (f0 - f1) / (q0 - q1 if divide else 1)
            horizon = float(q - anchor)
            damping = 1.0
            if not divide and horizon > _HORIZON:
                damping, horizon = _HORIZON / horizon, _HORIZON
            value = units[j] + damping * 0.5 * horizon * (full + local)
            window = [*window, (q, value)][-2:]
    return value


def foca(variant: str = "anchored") -> WeightRule:
    """FoCa in one of three variants (see the module's text)."""
    check_choice("variant", variant, ("anchored", "rolling", "cache_dit"))
    history = 2 if variant == "anchored" else 6
    name = "foca" if variant == "anchored" else f"foca_{variant}"
    return WeightRule(name, history, functools.partial(_weights, variant=variant))
