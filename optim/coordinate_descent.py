r"""Randomized coordinate descent with momentum: Kaczmarz on the rows of a square root.

For ``M x = c`` with ``M`` positive definite, coordinate ``i`` is drawn with probability
:math:`M_{ii}/\operatorname{tr} M`, and the step is the mean of ``B`` such corrections,

.. math:: g(y) = \frac1B \sum_{i \in \text{batch}} \frac{(M y - c)_i}{M_{ii}}\,e_i .

In the variables :math:`z = M^{1/2} x` this is randomized Kaczmarz on the rows of
:math:`M^{1/2}`, with :math:`H = M/\operatorname{tr} M` and :math:`R^2 = \operatorname{tr} H = 1`,
so the same rule gives learning rate and momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int, check_shape, is_concrete
from fadex.optim.interpolation_oracle import STYLES
from fadex.optim.kaczmarz import InterpolationResult, choose_momentum, run_momentum, sampler
from fadex.optim.momentum import Momentum


def coordinate_descent(
    M: jax.Array,
    c: jax.Array,
    key: jax.Array | None = None,
    *,
    batch_size: int = 1,
    momentum: str | Momentum | None = "auto",
    style: str = "heavy_ball",
    num_steps: int,
    x0: jax.Array | None = None,
    indices: jax.Array | None = None,
    record: Callable[[jax.Array], Any] | None = None,
    every: int = 1,
) -> InterpolationResult:
    r"""Randomized block coordinate descent with momentum for ``M x = c``, ``M`` positive definite.

    .. math:: x_{t+1} = y_t - \frac{\eta}{B} \sum_i \frac{(M y_t - c)_i}{M_{ii}} e_i + \ldots,
       \qquad \Pr(i) = M_{ii}/\operatorname{tr} M

    A coordinate drawn twice is corrected twice. Jittable with the same arguments static as
    :func:`~fadex.optim.kaczmarz`; works under ``vmap`` over keys.

    Args:
      M: ``[d, d]``, symmetric positive definite; unless it is traced, its diagonal is checked, and
        its symmetry to half of the dtype's digits.
      c: ``[d]``.
      key: from which coordinates are drawn, with replacement.
      batch_size: ``B``, >= 1; 1 is the classical method with exact minimisation along ``e_i``.
      momentum, style, num_steps, x0, indices, record, every: as
        :func:`~fadex.optim.kaczmarz`.

    Returns:
      An :class:`~fadex.optim.InterpolationResult`.

    Raises:
      ValueError, TypeError: as :func:`~fadex.optim.kaczmarz`, a diagonal that is not positive, or
        a matrix that is not symmetric.

    Source: Leventhal and Lewis 2010 for ``B = 1``; momentum for ``B > 1`` reconstructed from the
    abstract of arXiv 2605.18609.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import coordinate_descent
      >>> M = jnp.array([[2.0, 1.0], [1.0, 3.0]])
      >>> out = coordinate_descent(M, M @ jnp.array([1.0, 2.0]), jax.random.key(0), batch_size=2,
      ...                          num_steps=100)
      >>> print(out.x.round(3))
      [1. 2.]
    """
    M, c = jnp.asarray(M), jnp.asarray(c)
    check_shape("M", M, (None, None))
    d = M.shape[0]
    check_shape("M", M, (d, d))
    check_shape("c", c, (d,))
    if d == 0:
        raise ValueError("M: expected at least one row and one column, got shape (0, 0)")
    check_choice("style", style, STYLES)
    check_int("batch_size", batch_size, minimum=1)
    dtype = jnp.result_type(M, c, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"M: expected real numbers, got dtype {dtype}")
    M, c = M.astype(dtype), c.astype(dtype)
    diagonal = jnp.diagonal(M)
    if is_concrete(diagonal) and not np.all(np.asarray(diagonal) > 0):
        raise ValueError("M: expected a positive diagonal, got the smallest entry "
                         f"{float(np.min(diagonal))}")
    if is_concrete(M):
        dense = np.asarray(M)
        dense = dense / np.max(np.abs(dense))
        gap = np.max(np.abs(dense - dense.T))  # NaN passes, and shows in the result
        if gap > np.sqrt(jnp.finfo(dtype).eps):
            raise ValueError("M: expected a symmetric matrix, got entries that differ from their "
                             f"mirror image by {gap:.3g} of the largest")
    x0 = jnp.zeros(d, dtype) if x0 is None else jnp.asarray(x0, dtype)
    check_shape("x0", x0, (d,))

    def gradient(y, batch):
        correction = (M[batch] @ y - c[batch]) / diagonal[batch]
        return jnp.zeros_like(y).at[batch].add(correction / batch_size)

    return run_momentum(
        gradient, sampler(diagonal), x0,
        choose_momentum(momentum, M / jnp.trace(M), batch_size, style), key,
        batch_size=batch_size, style=style, num_steps=num_steps, indices=indices, record=record,
        every=every,
    )
