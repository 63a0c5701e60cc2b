r"""ODE and SDE samplers as pure step functions of a model output.

A :class:`Sampler` knows nothing of models, guidance or caches: ``step(out, x, t, t_next,
state, denoise)`` maps the model output at ``(x, t)`` and the state ``x`` to the next ones.
The output may as well be a forecast; multistep samplers remember it either way.

Letters: ``x`` latents, ``v`` velocity (``x_t = (1 - t) x_0 + t e``, ``v = e - x_0``),
``eps`` noise prediction, ``abar`` cumulative product of ``1 - beta``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int, check_real

Denoise = Callable[[jax.Array, jax.Array], jax.Array]


class Sampler(NamedTuple):
    """A sampler as pure functions (hashable: jitted programs take it as static).

    Attributes:
      init: ``init(x, key) -> state``; ``key`` is None for deterministic samplers.
      step: ``step(out, x, t, t_next, state, denoise) -> (x_next, state)``; ``t`` and
        ``t_next`` are scalars, or ``[B, 1, ...]`` when each sample has a grid of its own;
        ``denoise(x, t)`` calls the model once more.
      evals_per_step: model evaluations of one step, the first of which gave ``out``.
      stochastic: whether ``init`` needs a key.
      prediction: what ``out`` is, ``"velocity"`` or ``"epsilon"``.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]
    evals_per_step: int = 1
    stochastic: bool = False
    prediction: str = "velocity"


def _no_state(x: jax.Array, key: jax.Array | None = None) -> tuple[()]:
    del x, key
    return ()


def _euler_step(out, x, t, t_next, state, denoise=None):
    del denoise
    return x + (t_next - t) * out, state


def flow_euler() -> Sampler:
    """Explicit Euler on the flow ODE, ``x' = x + (t' - t) v``. First order.

    Example:
      >>> from fadex.sampling import flow_euler
      >>> flow_euler().step(2.0, 1.0, 1.0, 0.5, ())
      (0.0, ())
    """
    return Sampler(_no_state, _euler_step)


def _heun_step(out, x, t, t_next, state, denoise):
    dt = t_next - t
    predicted = x + dt * out
    # At the end the corrector would ask for the velocity of clean data: plain Euler there.
    velocity = denoise(predicted, t_next)
    averaged = x + 0.5 * dt * (out + velocity)
    return jnp.where(t_next == 0, predicted, averaged), state


def flow_heun() -> Sampler:
    r"""Heun's method, two evaluations a step. Second order.

    ``x^ = x + dt v``; ``x' = x + dt/2 (v + v(x^, t'))``; plain Euler when ``t' = 0``.
    A cache serves the first evaluation only.
    """
    return Sampler(_no_state, _heun_step, evals_per_step=2)


class MultistepState(NamedTuple):
    """What a two-step method remembers."""

    previous: jax.Array  # like x: the previous (possibly forecast) output or prediction
    t_previous: jax.Array  # float32 [] or [B, 1, ...]; inf before the first step


def _multistep_init(x: jax.Array, key: jax.Array | None = None) -> MultistepState:
    del key
    return MultistepState(jnp.zeros_like(x), jnp.full((), jnp.inf, jnp.float32))


def _ab2_step(out, x, t, t_next, state, denoise=None):
    del denoise
    dt = t_next - t
    first = jnp.isinf(state.t_previous)
    ratio = jnp.where(first, 0.0, dt / jnp.where(first, 1.0, t - state.t_previous))
    # The first step is Euler; its ratio 0 cancels the zeros that stand for the past.
    x_next = x + dt * ((1.0 + 0.5 * ratio) * out - 0.5 * ratio * state.previous)
    previous = out.astype(state.previous.dtype)
    return x_next, MultistepState(previous, jnp.asarray(t, jnp.float32))


def ab2() -> Sampler:
    r"""Adams-Bashforth of order 2 with variable steps, one evaluation a step.

    .. math:: x' = x + dt\,[(1 + r/2) v - (r/2) v_{prev}], \quad r = dt / dt_{prev}

    The first step is Euler.
    """
    return Sampler(_multistep_init, _ab2_step)


def linear_alphas_cumprod(
    train_steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 2e-2
) -> np.ndarray:
    """``abar`` of the linear beta schedule of DDPM and DiT, float64 ``[train_steps]``."""
    train_steps = check_int("train_steps", train_steps, minimum=1)
    return np.cumprod(1.0 - np.linspace(beta_start, beta_end, train_steps))


def _check_alphas(alphas_cumprod: Any) -> tuple[float, ...]:
    abar = np.asarray(linear_alphas_cumprod() if alphas_cumprod is None else alphas_cumprod)
    if abar.ndim != 1 or not np.all((abar > 0) & (abar <= 1)) or np.any(np.diff(abar) >= 0):
        raise ValueError(
            "alphas_cumprod: expected a decreasing vector with values in (0, 1], got shape "
            f"{abar.shape}"
        )
    return tuple(float(a) for a in abar)


@functools.lru_cache(maxsize=32)
def _alpha_tables(abar: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """``sqrt(abar)`` and ``sqrt(1 - abar)`` in float32, with the clean data behind the end."""
    values = np.append(np.asarray(abar, np.float64), 1.0)
    return np.sqrt(values).astype(np.float32), np.sqrt(1.0 - values).astype(np.float32)


def _vp_coefficients(abar: tuple[float, ...], t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(alpha, sigma)`` at timestep index ``t``; any negative index stands for clean data."""
    alpha, sigma = _alpha_tables(abar)
    index = jnp.asarray(jnp.round(t), jnp.int32)
    index = jnp.where(index < 0, len(abar), index)
    return jnp.asarray(alpha)[index], jnp.asarray(sigma)[index]


def _flow_coefficients(t: jax.Array) -> tuple[jax.Array, jax.Array]:
    return 1.0 - t, jnp.asarray(t)


def _ddim_init(x: jax.Array, key: jax.Array | None = None) -> Any:
    del x
    return () if key is None else key


def _ddim_step(out, x, t, t_next, state, denoise=None, *, coefficients, eta):
    del denoise
    alpha, sigma = coefficients(t)
    alpha_next, sigma_next = coefficients(t_next)
    x0 = (x - sigma * out) / alpha
    if eta == 0.0:
        return alpha_next * x0 + sigma_next * out, state
    # sigma^2 = 1 - abar: s = eta * sqrt((1-abar')/(1-abar)) * sqrt(1 - abar/abar').
    s = eta * sigma_next / sigma * jnp.sqrt(jnp.maximum(1.0 - (alpha / alpha_next) ** 2, 0.0))
    direction = jnp.sqrt(jnp.maximum(sigma_next**2 - s**2, 0.0))
    key, draw = jax.random.split(state)
    noise = jax.random.normal(draw, x.shape, x.dtype)
    return alpha_next * x0 + direction * out + s * noise, key


@functools.lru_cache(maxsize=32)
def _ddim(abar: tuple[float, ...], eta: float) -> Sampler:
    step = functools.partial(
        _ddim_step, coefficients=functools.partial(_vp_coefficients, abar), eta=eta
    )
    return Sampler(_ddim_init, step, stochastic=eta > 0, prediction="epsilon")


def ddim(alphas_cumprod: Any = None, *, eta: float = 0.0) -> Sampler:
    r"""DDIM (Song et al., arXiv 2010.02502) for a noise-predicting model.

    .. math::
       x_0 &= (x - \sqrt{1-\bar\alpha}\,\epsilon)/\sqrt{\bar\alpha}, \quad
       s = \eta \sqrt{\tfrac{1-\bar\alpha'}{1-\bar\alpha}}\sqrt{1-\bar\alpha/\bar\alpha'}, \\
       x' &= \sqrt{\bar\alpha'}\,x_0 + \sqrt{1-\bar\alpha'-s^2}\,\epsilon + s z.

    Args:
      alphas_cumprod: ``abar`` by timestep index, decreasing; linear betas over 1000 steps by
        default.
      eta: 0 is deterministic; above 0 the sampler needs a key.

    Timesteps are indices into ``alphas_cumprod`` (see :func:`timestep_indices`), and the
    model gets the index itself.
    """
    eta = check_real("eta", eta, minimum=0.0, maximum=1.0)
    return _ddim(_check_alphas(alphas_cumprod), eta)


def _dpmpp_step(out, x, t, t_next, state, denoise=None, *, coefficients, prediction):
    del denoise
    alpha, sigma = coefficients(t)
    alpha_next, sigma_next = coefficients(t_next)
    data = x - t * out if prediction == "velocity" else (x - sigma * out) / alpha
    first = jnp.isinf(state.t_previous)
    alpha_prev, sigma_prev = coefficients(jnp.where(first, t, state.t_previous))
    log_snr = lambda a, s: jnp.log(a) - jnp.log(s)
    here = log_snr(alpha, sigma)
    h = log_snr(alpha_next, sigma_next) - here
    h_prev = here - log_snr(alpha_prev, sigma_prev)
    # First order where a log-SNR is infinite: the first step, the step after t = 1 (the
    # previous alpha is 0) and the last step (the next sigma is 0).
    usable = ~first & (sigma_next > 0) & (alpha_prev > 0) & (alpha > 0)
    ratio = jnp.where(usable, h / jnp.where(usable, 2.0 * h_prev, 1.0), 0.0)
    combined = data + ratio * (data - state.previous)
    scale = sigma_next / sigma
    x_next = scale * x + (alpha_next - alpha * scale) * combined
    previous = data.astype(state.previous.dtype)
    return x_next, MultistepState(previous, jnp.asarray(t, jnp.float32))


@functools.lru_cache(maxsize=32)
def _dpmpp_2m(prediction: str, abar: tuple[float, ...] | None) -> Sampler:
    coefficients = (
        _flow_coefficients if abar is None else functools.partial(_vp_coefficients, abar)
    )
    step = functools.partial(_dpmpp_step, coefficients=coefficients, prediction=prediction)
    return Sampler(_multistep_init, step, prediction=prediction)


def dpmpp_2m(prediction: str = "velocity", alphas_cumprod: Any = None) -> Sampler:
    r"""DPM-Solver++(2M), data prediction (Lu et al., arXiv 2211.01095).

    With :math:`\lambda = \log(\alpha/\sigma)`, :math:`h = \lambda' - \lambda` and data
    predictions :math:`D`,

    .. math::
       \tilde D = D + \tfrac{h}{2 h_{prev}} (D - D_{prev}), \quad
       x' = \tfrac{\sigma'}{\sigma} x + (\alpha' - \alpha \tfrac{\sigma'}{\sigma}) \tilde D.

    First and last step, and the step after ``t = 1``, use :math:`\tilde D = D`.

    Args:
      prediction: ``"velocity"`` (flow matching: ``alpha = 1 - t``, ``sigma = t``) or
        ``"epsilon"`` (timestep indices into ``alphas_cumprod``).
      alphas_cumprod: for ``"epsilon"``; linear betas over 1000 steps by default.
    """
    check_choice("prediction", prediction, ("velocity", "epsilon"))
    if prediction == "velocity":
        if alphas_cumprod is not None:
            raise ValueError("alphas_cumprod: only for prediction='epsilon'")
        return _dpmpp_2m("velocity", None)
    return _dpmpp_2m("epsilon", _check_alphas(alphas_cumprod))
