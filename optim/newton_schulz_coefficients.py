r"""Coefficients of the Newton-Schulz iteration for the polar factor.

One step maps every singular value by an odd quintic, :math:`p(x) = a x + b x^3 + c x^5`. The
polar express rule picks each step's polynomial as the best uniform approximation of 1 on the
interval that the steps before it left, by the exchange algorithm on four points: solve

.. math:: p(x_i) = 1 - (-1)^i E, \quad x_0 < x_1 < x_2 < x_3,

for ``(a, b, c, E)``, move the two inner points to the extrema of ``p``, where
:math:`x^2 = (-3b \mp \sqrt{9b^2 - 20ac}) / 10c`, and repeat until nothing moves.

Everything here runs on the host in float64; the tables are constants of the traced program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int, check_real, is_concrete

# p with p(1) = 1 and p'(1) = p''(1) = 0: what every rule tends to once converged.
LIMIT = (15 / 8, -10 / 8, 3 / 8)
MUON = (3.4445, -4.7750, 2.0315)
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
PRESETS = ("polar_express", "muon", "dion")
_SAFETY = 1.01
_DEFAULT_STEPS = {"polar_express": 6, "muon": 5, "dion": 5}


def _best_quintic(lower: float, upper: float) -> np.ndarray:
    """The odd quintic with the least ``max |1 - p|`` on ``[lower, upper]``, float64 ``[3]``."""
    if lower / upper > 1 - 5e-6:
        # The interval is a point to rounding, where the linear system is singular.
        return np.array(LIMIT) / upper ** np.array([1.0, 3.0, 5.0])
    inner = np.array([3 * lower + upper, lower + 3 * upper]) / 4
    error = np.inf
    for _ in range(100):
        nodes = np.array([lower, inner[0], inner[1], upper])
        system = np.stack([nodes, nodes**3, nodes**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, new_error = np.linalg.solve(system, np.ones(4))
        if abs(error - new_error) <= 1e-15:
            break
        error = new_error
        root = np.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return np.array([a, b, c])


def polar_express_coefficients(
    steps: int,
    lower: float = 1e-3,
    cushion: float = 0.02407327424182761,
    safety: bool = True,
) -> np.ndarray:
    r"""Newton-Schulz coefficients that are best, step by step, for singular values in a range.

    Step ``t`` sees singular values in :math:`[l, u]` (at first ``[lower, 1]``), takes the best
    odd quintic on :math:`[\max(l, \text{cushion} \cdot u), u]`, scales it by
    :math:`2 / (p(l) + p(u))` so that the image of the whole interval is centred on 1, and
    passes :math:`[p(l), 2 - p(l)]` on. The cushion keeps the first steps from amplifying tiny
    singular values so hard that the middle of the range turns non-monotone.

    Args:
      steps: number of rows, >= 1.
      lower: the least relative singular value :math:`\sigma / \|g\|_F` that has to converge,
        in (0, 1). Smaller ones grow about ``8 * 4 ** (steps - 1)``-fold and stay below 1.
      cushion: lower end of the fitted interval in units of its upper end, in (0, 1).
      safety: evaluate every step that has not reached the limit (15/8, -10/8, 3/8) at
        ``x / 1.01``, so that singular values which rounding pushed above ``u`` don't escape.

    Returns:
      float64 ``[steps, 3]``: rows ``(a, b, c)`` of ``a x + b x**3 + c x**5``.

    Raises:
      TypeError, ValueError: an argument is not a number, or out of range.

    Example:
      >>> polar_express_coefficients(1, safety=False).round(4).tolist()
      [[8.2872, -23.5959, 17.3004]]

    Source: N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express: Optimal Matrix Sign
    Methods and Their Application to the Muon Algorithm", https://arxiv.org/abs/2505.16932.
    """
    check_int("steps", steps, minimum=1)
    check_real("lower", lower, minimum=0, maximum=1, exclusive=True)
    check_real("cushion", cushion, minimum=0, maximum=1, exclusive=True)
    powers = np.array([1.0, 3.0, 5.0])
    low, high, rows = float(lower), 1.0, []
    for _ in range(steps):
        row = _best_quintic(max(low, cushion * high), high)
        ends = np.array([low, high])[:, None] ** powers @ row
        scale = 2 / ends.sum()
        rows.append(row * scale)
        low = float(ends[0] * scale)
        high = 2 - low
    table = np.array(rows)
    if safety:
        unfinished = np.abs(table - LIMIT).max(1) > 1e-8
        table[unfinished] /= _SAFETY**powers
    return table


@functools.lru_cache(maxsize=64)
def _preset(name: str, steps: int) -> np.ndarray:
    if name == "polar_express":
        return polar_express_coefficients(steps)
    if name == "muon":
        return np.tile(np.array(MUON), (steps, 1))
    return _continued(np.array(DION), steps)


def _continued(table: Any, steps: int) -> Any:
    """The first ``steps`` rows; past the table's end the limit triple repeats."""
    missing = steps - table.shape[0]
    if missing <= 0:
        return table[:steps]
    tail = np.tile(np.array(LIMIT), (missing, 1))
    if isinstance(table, np.ndarray):
        return np.concatenate([table, tail])
    return jnp.concatenate([table, tail.astype(table.dtype)])


def resolve_coefficients(coefficients: Any, steps: int | None) -> Any:
    """The table ``[steps, 3]`` for a preset's name or an array ``[k, 3]`` or ``[3]``.

    ``steps=None`` means 6 for ``"polar_express"``, 5 for ``"muon"`` and ``"dion"``, ``k`` for
    an array. More steps than rows: the rest are the limit triple (``"muon"`` and ``[3]``
    repeat their one row).

    Raises:
      TypeError, ValueError: an unknown name, a wrong shape, or ``steps`` < 1.
    """
    if steps is not None:
        check_int("steps", steps, minimum=1)
    if isinstance(coefficients, str):
        check_choice("coefficients", coefficients, PRESETS)
        return _preset(coefficients, steps or _DEFAULT_STEPS[coefficients])
    # Only what is traced stays with JAX: kernels are built around numbers.
    if is_concrete(coefficients):
        coefficients = np.asarray(coefficients, np.float64)
    elif not jnp.issubdtype(coefficients.dtype, jnp.floating):
        coefficients = coefficients.astype(jnp.result_type(float))
    shape = coefficients.shape
    if len(shape) not in (1, 2) or shape[-1] != 3 or shape[0] == 0:
        raise ValueError(f"coefficients: expected a name or shape [k, 3] or [3], got {shape}")
    if len(shape) == 1:
        xp = np if isinstance(coefficients, np.ndarray) else jnp
        return xp.broadcast_to(coefficients, (steps or 5, 3))
    return _continued(coefficients, steps or shape[0])
