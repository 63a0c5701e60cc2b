"""Rates of scalar AcceleGrad# on quadratics, against the diameter it is told.

    python benchmarks/optim_rates.py

* ``l2``: log-uniform spectrum 1e-9..1, d = 600, 10 000 steps (slope over steps 30..3000);
* ``linf``: Nesterov's tridiagonal function, d = 1000, 2000 steps;
* ``spectral``: a 24 x 16 matrix quadratic with log-uniform spectra, 2000 steps;
* ``descent``: gradient descent with step 1/L on the first one.

Each row: the slope of log f(y_T) - f* over log T, and f(y_T) - f* times T² over ‖x_0 - x*‖₂².
Float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fadex.optim import NormSpec, accelegrad, accelegrad_sharp

RESULTS = Path(__file__).parent / "results" / "optim_rates.json"
FACTORS = (0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 10.0)


def curve(opt, gap, grad, x0, steps):
    def step(carry, _):
        x, state = carry
        updates, state = opt.update(grad(x), state, x)
        return (x + updates, state), gap(state.y)

    return jax.lax.scan(step, (x0, opt.init(x0)), None, length=steps)[1]


def slope(values, last=None):
    t = np.arange(1, len(values) + 1)
    window = (t >= 30) & (t <= (last or len(t)))
    return float(np.polyfit(np.log(t[window]), np.log(np.asarray(values)[window]), 1)[0])


def problems():
    """name: (gap to the optimum, its gradient, start, ‖x_0 - x*‖₂, steps, last step of the fit)."""
    spectrum = jnp.geomspace(1e-9, 1, 600)
    yield "l2", "l2", lambda x: 0.5 * jnp.sum(spectrum * x * x), jnp.full(600, 600**-0.5), 1.0, \
        10_000, 3000
    size = 1000
    f = lambda x: 0.125 * (x[0] ** 2 + jnp.sum(jnp.diff(x) ** 2) + x[-1] ** 2) - 0.25 * x[0]
    best = 1 - jnp.arange(1, size + 1) / (size + 1)
    yield "linf, tridiagonal", "linf", lambda x: f(x) - f(best), jnp.zeros(size), \
        float(jnp.linalg.norm(best)), 2000, None
    left, right = jnp.geomspace(1e-5, 1, 24), jnp.geomspace(1e-4, 1, 16)
    yield "spectral", NormSpec("spectral", scale="unit", method="svd"), \
        lambda x: 0.5 * jnp.sum(left[:, None] * right * x * x), \
        jnp.full((24, 16), (24 * 16) ** -0.5), 1.0, 2000, None


def measure(name, norm, gap, x0, distance, steps, last):
    """Rows of one problem; every diameter in one program."""
    grad = jax.grad(gap)
    row = lambda method, factor, values: {
        "problem": name, "method": method, "diameter": factor, "slope": slope(values, last),
        "constant": float(values[-1] * steps**2 / distance**2),
    }
    one = lambda d: curve(accelegrad_sharp(diameter=d, norm=norm), gap, grad, x0, steps)
    curves = np.asarray(jax.jit(jax.vmap(one))(distance * jnp.array(FACTORS)))
    rows = [row("AcceleGrad#", *pair) for pair in zip(FACTORS, curves)]
    if name == "l2":
        euclid = jax.jit(lambda: curve(accelegrad(1.0), gap, grad, x0, steps))()
        descent = jax.lax.scan(lambda x, _: (x - grad(x), gap(x)), x0, None, length=steps)[1]
        rows += [row("AcceleGrad", 1.0, np.asarray(euclid)),
                 row("gradient descent, 1/L", None, np.asarray(descent))]
    return rows


def run(out: Path | None = RESULTS) -> dict:
    with jax.enable_x64(True):
        rows = [row for problem in problems() for row in measure(*problem)]
    result = {"rows": rows}
    for row in rows:
        about = "" if row["diameter"] is None else f"D = {row['diameter']:g} ‖x_0 - x*‖"
        print(f"{row['problem']:18s} {row['method']:22s} {about:22s} slope {row['slope']:6.3f}   "
              f"f T²/‖x_0 - x*‖² {row['constant']:.4g}")
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    run()
