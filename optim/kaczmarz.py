r"""Mini-batch least squares that can be solved exactly; randomized Kaczmarz.

Both draw ``B`` rows a step, with replacement, and take one step of heavy ball or Nesterov,

.. math:: g(y) = \frac1B \sum_{i \in \text{batch}} a_i\,(a_i^\top y - b_i),\qquad
   x_{t+1} = y_t - \eta\,g(y_t) + [\text{heavy ball}]\;\beta\,(x_t - x_{t-1}),

with :math:`y_t = x_t` (heavy ball) or :math:`x_t + \beta(x_t - x_{t-1})` (Nesterov). **Kaczmarz**
draws row ``i`` with probability :math:`\|a_i\|^2/\|A\|_F^2` and uses it normalised. Then
:math:`R^2 = \operatorname{tr} H = 1` with :math:`H = A^\top A/\|A\|_F^2`, so the rule of
:func:`~fadex.optim.interpolation_momentum` needs no estimate of it, and for ``B = 1`` comes down to
``eta = 1, beta = 0`` (where ``lmax <= 1/2``; always taken here): the classical projection
:math:`x \mathrel{+}= (b_i - a_i^\top x) a_i/\|a_i\|^2` of Strohmer and Vershynin 2009.

A step reads ``B d`` numbers for two products with vectors: bound by memory, with nothing that a
kernel could save. Rows are drawn ahead, a block of steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice, check_int, check_shape
from fadex.optim.interpolation_oracle import STYLES
from fadex.optim.momentum import Momentum, interpolation_momentum

# Steps whose rows are drawn at once where nothing is recorded.
_BLOCK = 256


class InterpolationResult(NamedTuple):
    """What a run returns."""

    x: jax.Array  # [d], the iterate x_T
    velocity: jax.Array  # [d], x_T - x_{T-1}
    history: Any  # recorded values stacked along a first axis of num_steps // every, or None


def spectrum_ends(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest and smallest non-zero eigenvalue of a positive semidefinite matrix; 1 for zero."""
    values = jnp.linalg.eigvalsh(gram)
    values = jnp.where(values[-1] == 0, 1, values)
    floor = gram.shape[0] * jnp.finfo(gram.dtype).eps * values[-1]
    return values[-1], jnp.min(jnp.where(values > floor, values, jnp.inf))


def choose_momentum(momentum: Any, gram: jax.Array, batch_size: int, style: str) -> Momentum:
    """``momentum`` itself, or by the rule for normalised rows with ``H = gram`` of trace 1."""
    if isinstance(momentum, Momentum):
        return momentum
    if momentum is not None:
        check_choice("momentum", momentum, ("auto", None))
    if batch_size == 1:
        # The classical method; the rule agrees where lmax <= 1/2.
        return Momentum(1.0, 0.0, jnp.inf)
    lmax, mu = spectrum_ends(gram)
    if momentum is None:
        # The best step by E[H_B^2] <= (1/B + (1 - 1/B) lmax) H, within the curvature's limit.
        eta = jnp.minimum(batch_size / (1 + (batch_size - 1) * lmax), 1 / lmax)
        return Momentum(eta, jnp.zeros_like(eta), 1 / jnp.sqrt(lmax * mu))
    # c = 1 keeps one row at a time the classical method.
    return interpolation_momentum(batch_size, 1.0, lmax, mu, style=style, c=1.0)


def run_momentum(
    gradient: Callable[[jax.Array, jax.Array], jax.Array],
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    x0: jax.Array,
    momentum: Momentum,
    key: jax.Array | None,
    *,
    batch_size: int,
    style: str,
    num_steps: int,
    indices: jax.Array | None,
    record: Callable[[jax.Array], Any] | None,
    every: int,
) -> InterpolationResult:
    """Scan ``num_steps`` steps with ``gradient(y, batch)``, ``batch`` from ``draw(key, shape)``."""
    check_choice("style", style, STYLES)
    check_int("num_steps", num_steps, minimum=1)
    check_int("batch_size", batch_size, minimum=1)
    check_int("every", every, minimum=1)
    if (key is None) == (indices is None):
        raise ValueError("key: expected a key or else indices, got "
                         + ("neither" if key is None else "both"))
    if indices is not None:
        check_shape("indices", indices, (num_steps, batch_size))
    eta, beta = (jnp.asarray(v, x0.dtype) for v in (momentum.learning_rate, momentum.decay))
    ahead = beta if style == "nesterov" else jnp.zeros_like(beta)

    def step(carry, batch):
        x, velocity = carry
        velocity = beta * velocity - eta * gradient(x + ahead * velocity, batch)
        return (x + velocity, velocity), None

    def block(carry, first, length):
        steps = first + jnp.arange(length)
        if indices is None:
            # A key for each step, so the rows do not depend on the length of the block.
            keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(steps)
            batches = jax.vmap(lambda k: draw(k, (batch_size,)))(keys)
        else:
            batches = jnp.asarray(indices)[steps]
        return jax.lax.scan(step, carry, batches)[0]

    length = min(every if record is not None else _BLOCK, num_steps)
    if record is not None and num_steps < every:
        raise ValueError(f"every: must be <= num_steps = {num_steps}, got {every}")

    def blocks(carry, first):
        carry = block(carry, first, length)
        return carry, None if record is None else record(carry[0])

    whole = num_steps // length
    carry, history = jax.lax.scan(
        blocks, (x0, jnp.zeros_like(x0)), jnp.arange(whole) * length
    )
    if num_steps % length:
        carry = block(carry, whole * length, num_steps % length)
    return InterpolationResult(*carry, history)


def _system(matrix, target, x0, names):
    """Arrays of one floating dtype, shapes checked."""
    matrix, target = jnp.asarray(matrix), jnp.asarray(target)
    check_shape(names[0], matrix, (None, None))
    if 0 in matrix.shape:
        raise ValueError(f"{names[0]}: expected at least one row and one column, got shape "
                         f"{matrix.shape}")
    check_shape(names[1], target, (matrix.shape[0],))
    dtype = jnp.result_type(matrix, target, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{names[0]}: expected real numbers, got dtype {dtype}")
    x0 = jnp.zeros(matrix.shape[1], dtype) if x0 is None else jnp.asarray(x0, dtype)
    check_shape("x0", x0, (matrix.shape[1],))
    return matrix.astype(dtype), target.astype(dtype), x0


def sampler(weights: jax.Array) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """``draw(key, shape)``: indices with probabilities proportional to ``weights``."""
    cumulative = jnp.cumsum(weights)
    last = weights.shape[0] - 1

    def draw(key, shape):
        u = jax.random.uniform(key, shape, weights.dtype) * cumulative[-1]
        return jnp.minimum(jnp.searchsorted(cumulative, u, side="right"), last)

    return draw


def _normalised(A: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of norm 1 or 0, their targets, and the rows' norms in units of the largest entry.

    Each row is divided by its largest entry first, so that no square over- or underflows.
    """
    tops = jnp.max(jnp.abs(A), axis=1)
    used = tops != 0  # and not > 0: a NaN is no zero
    # As in polar_factor: reciprocals stay normal numbers.
    shrink = jnp.where(tops > 1, 2.0**-40, 1.0).astype(A.dtype)
    divisor = jnp.where(used, tops * shrink, 1)
    rows = A * shrink[:, None] / divisor[:, None]
    lengths = jnp.where(used, jnp.linalg.norm(rows, axis=1), 1)
    top = jnp.max(tops)
    shrink_all = jnp.where(top > 1, 2.0**-40, 1.0).astype(A.dtype)
    norms = lengths * (tops * shrink_all / jnp.where(top == 0, 1, top * shrink_all))
    targets = jnp.where(used, b * shrink / divisor / lengths, 0)
    # No row is drawn by probabilities that are not finite: let every step show it.
    targets = targets + jnp.where(jnp.isfinite(jnp.sum(norms)), 0, jnp.nan)
    return rows / lengths[:, None], targets, norms


def minibatch_least_squares(
    rows: jax.Array,
    targets: jax.Array,
    key: jax.Array | None = None,
    *,
    batch_size: int,
    momentum: Momentum,
    style: str = "heavy_ball",
    num_steps: int,
    probabilities: jax.Array | None = None,
    x0: jax.Array | None = None,
    indices: jax.Array | None = None,
    record: Callable[[jax.Array], Any] | None = None,
    every: int = 1,
) -> InterpolationResult:
    r"""Mini-batch SGD with momentum on :math:`\frac12 \mathbb E(a^\top x - b)^2`.

    .. math:: x_{t+1} = y_t - \frac{\eta}{B} \sum_{i} a_i (a_i^\top y_t - b_i) + \ldots

    as in the module's formulas. Jittable with ``batch_size, style, num_steps, every`` and
    ``record`` static; works under ``vmap`` over keys and momenta.

    Args:
      rows: ``[m, d]``; ``targets``: ``[m]``, consistent.
      key: from which ``batch_size`` rows are drawn each step, with replacement.
      batch_size: ``B``, >= 1.
      momentum: a :class:`~fadex.optim.Momentum`, e.g. of
        :func:`~fadex.optim.interpolation_momentum`.
      style: ``"heavy_ball"`` or ``"nesterov"``.
      num_steps: ``T``.
      probabilities: ``[m]``, of the rows, up to a factor; uniform by default.
      x0: ``[d]``, zeros by default.
      indices: ``[T, B]``, rows to use instead of drawn ones; then without ``key``.
      record: function of ``x`` whose value is kept after each ``every`` steps.
      every: steps between two records.

    Returns:
      An :class:`InterpolationResult`; ``history`` is None without ``record``.

    Raises:
      ValueError, TypeError: wrong shapes, an unknown ``style``, neither or both of ``key`` and
        ``indices``, counts that are no positive integers, or ``momentum`` of another type.

    Source: Garg and Derezinski, arXiv 2605.18609 (abstract); a reconstruction.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import interpolation_momentum, minibatch_least_squares
      >>> rows = jax.random.normal(jax.random.key(0), (100, 3))
      >>> momentum = interpolation_momentum(8, row_norm_bound=5.0, lmax=1.2)
      >>> out = minibatch_least_squares(rows, rows @ jnp.ones(3), jax.random.key(1), batch_size=8,
      ...                               momentum=momentum, num_steps=100)
      >>> print(out.x.round(3))
      [1. 1. 1.]
    """
    if not isinstance(momentum, Momentum):
        raise TypeError(f"momentum: expected a Momentum, got {momentum!r}")
    rows, targets, x0 = _system(rows, targets, x0, ("rows", "targets"))
    weights = jnp.ones(rows.shape[0], rows.dtype)
    if probabilities is not None:
        weights = jnp.asarray(probabilities, rows.dtype)
        check_shape("probabilities", weights, (rows.shape[0],))

    def gradient(y, batch):
        a = rows[batch]
        return (a @ y - targets[batch]) @ a / batch_size

    return run_momentum(
        gradient, sampler(weights), x0, momentum, key, batch_size=batch_size, style=style,
        num_steps=num_steps, indices=indices, record=record, every=every,
    )


def kaczmarz(
    A: jax.Array,
    b: jax.Array,
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
    r"""Randomized block Kaczmarz with momentum for a consistent system ``A x = b``.

    .. math:: x_{t+1} = y_t + \frac{\eta}{B} \sum_{i} \frac{b_i - a_i^\top y_t}{\|a_i\|^2} a_i +
       \ldots, \qquad \Pr(i) = \|a_i\|^2 / \|A\|_F^2

    as in the module's formulas. From ``x0 = 0`` it goes to the solution of least norm. The scale
    of ``A`` does not matter. Rows of zeros are never drawn (``A = 0`` gives ``x0``), and one NaN
    or infinity in ``A`` makes ``x`` NaN. Jittable with ``batch_size, momentum`` (if a string),
    ``style, num_steps, every`` and ``record`` static; works under ``vmap`` over keys.

    Args:
      A: ``[m, d]``; ``b``: ``[m]``.
      key: from which rows are drawn, with replacement.
      batch_size: ``B``, >= 1; 1 is the classical method, unless a Momentum says otherwise.
      momentum: ``"auto"``: by :func:`~fadex.optim.interpolation_momentum` with ``R^2 = 1`` and
        the ends of the spectrum of ``H`` (one symmetric eigenproblem of the smaller side);
        None: no momentum, with the step ``min(B/(1 + (B-1) lmax), 1/lmax)``; or a
        :class:`~fadex.optim.Momentum`, which costs no eigenproblem.
      style: ``"heavy_ball"`` or ``"nesterov"``.
      num_steps: ``T``.
      x0: ``[d]``, zeros by default.
      indices: ``[T, B]``, rows to use instead of drawn ones; then without ``key``.
      record: function of ``x`` whose value is kept after each ``every`` steps.
      every: steps between two records.

    Returns:
      An :class:`InterpolationResult`.

    Raises:
      ValueError, TypeError: as :func:`minibatch_least_squares`, or an unknown ``momentum``.

    Source: Strohmer and Vershynin 2009 for ``B = 1``; momentum for ``B > 1`` reconstructed from
    the abstract of arXiv 2605.18609.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import kaczmarz
      >>> A = jax.random.normal(jax.random.key(0), (50, 4))
      >>> out = kaczmarz(A, A @ jnp.ones(4), jax.random.key(1), batch_size=8, num_steps=100)
      >>> print(out.x.round(3))
      [1. 1. 1. 1.]
    """
    A, b, x0 = _system(A, b, x0, ("A", "b"))
    rows, targets, norms = _normalised(A, b)
    total = jnp.linalg.norm(norms)
    unit = rows * (norms / jnp.where(total == 0, 1, total))[:, None]
    gram = unit.T @ unit if A.shape[1] <= A.shape[0] else unit @ unit.T
    return minibatch_least_squares(
        rows, targets, key, batch_size=check_int("batch_size", batch_size, minimum=1),
        momentum=choose_momentum(momentum, gram, batch_size, check_choice("style", style, STYLES)),
        style=style, num_steps=num_steps, probabilities=norms**2, x0=x0, indices=indices,
        record=record, every=every,
    )
