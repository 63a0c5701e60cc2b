"""Heavy ball in synthetic river valleys, and dual-anchor under noise.

    python benchmarks/optim_river.py [--parts edge,drift,...] [--again]

* ``edge``: the largest stable learning rate, by bisection, against 2 (1 + beta) / lambda;
* ``drift``: distance along a straight river at 0.98 of the edge, relative to gradient descent;
* ``variance``: noisy hill sides against the closed form;
* ``curved``: a winding river; the best learning rate whose path stays within 0.2 of the floor at
  every step;
* ``suggest``: ``suggest`` in a valley of three curvatures: excess loss, and what is left of it
  after a linear decay of the learning rate over the last fifth;
* ``gain``: noise gain of dual-anchor and of Halpern's method (OHM);
* ``horizon``: N times the residual at noise 1 / N, on a rotation, and the residual at fixed noise;
* ``monotone``: a strongly monotone field, N steps with batch N;
* ``logistic``: gradient norm of logistic regression after 199 steps of equal batches, against SGD
  at the same step and at its best one.

A part that stands in ``benchmarks/results/optim_river.json`` is not run again without
``--again``. All runs are float32 on fixed keys.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.optim import (
    dual_anchor,
    heavy_ball,
    hill_variance,
    noise_gain,
    river_limits,
    river_valley_2d,
    river_valley_nd,
    suggest,
)

RESULTS = Path(__file__).parent / "results" / "optim_river.json"
SHARPNESS, SLOPE, STEPS = 100.0, 0.1, 3000


@jax.jit
def ride(amplitude, rate, decay):
    """Runs ``[n]`` of 3000 steps: u at the end, last and worst distance from the floor."""
    def one(amplitude, rate, decay):
        valley = river_valley_2d(SHARPNESS, amplitude, 1.0, SLOPE)
        opt = heavy_ball(rate, decay)

        def body(carry, _):
            x, state, worst = carry
            update, state = opt.update(jax.grad(valley.loss)(x), state)
            x = x + update
            return (x, state, jnp.maximum(worst, jnp.abs(valley.split(x)[1][0]))), None

        x = valley.join(0.0, jnp.where(amplitude == 0, 0.5, 0.0)[None])
        (x, _, worst), _ = jax.lax.scan(body, (x, opt.init(x), 0.0), None, STEPS)
        u, offset = valley.split(x)
        return u, jnp.abs(offset[0]), worst

    return jax.vmap(one)(*(jnp.asarray(a, jnp.float32) for a in (amplitude, rate, decay)))


def edge() -> list[dict]:
    betas = np.array([0.0, 0.5, 0.9, 0.99])
    low, high = np.zeros(4), np.full(4, 8.0)
    for _ in range(16):
        middle = (low + high) / 2
        stable = np.asarray(ride(np.zeros(4), middle / SHARPNESS, betas)[1]) < 0.5
        low, high = np.where(stable, middle, low), np.where(stable, high, middle)
    return [dict(beta=b, measured=round(x, 4), theory=2 * (1 + b))
            for b, x in zip(betas.tolist(), low.tolist())]


def drift() -> list[dict]:
    betas = np.array([0.0, 0.5, 0.9, 0.99])
    rate = 0.98 * np.asarray(river_limits(SHARPNESS, betas).max_learning_rate)
    u = np.asarray(ride(np.zeros(4), rate, betas)[0])
    gain = river_limits(SHARPNESS, betas).drift_gain
    return [dict(beta=b, measured=round(float(x / u[0]), 3), theory=round(float(g), 3))
            for b, x, g in zip(betas.tolist(), u, gain)]


def variance() -> list[dict]:
    decay, product = jnp.array([0.9, 0.9, 0.99]), jnp.array([0.5, 2.5, 3.0])
    valley = river_valley_2d(SHARPNESS, slope=0.0, noise_scale=2.0)

    @jax.jit
    def measure(key):
        def step(decay, rate, g, state, x):
            update, state = heavy_ball(rate, decay).update(g, state)
            return state, x + update

        def body(carry, key):
            x, state = carry
            keys = jax.random.split(key, 4000)
            g = jax.vmap(lambda x: jax.vmap(valley.gradient)(keys, x))(x)
            state, x = jax.vmap(step)(decay, product / SHARPNESS, g, state, x)
            return (x, state), jnp.mean(x[..., 1] ** 2, axis=1)

        x = jnp.zeros((3, 4000, 2))
        start = x, jax.vmap(heavy_ball(0.1, 0.9).init)(x)
        return jax.lax.scan(body, start, jax.random.split(key, 2000))[1][-1000:].mean(0)

    found = measure(jax.random.key(0))
    theory = hill_variance(SHARPNESS, product / SHARPNESS, decay, 2.0)
    return [dict(beta=round(float(b), 3), eta_lambda=float(a), measured=float(v), theory=float(t))
            for b, a, v, t in zip(decay, product, found, theory)]


def curved() -> list[dict]:
    rows = []
    grid = np.geomspace(0.02, 1.0, 400)
    for beta in (0.0, 0.5, 0.9, 0.95, 0.99):
        rate = grid * 2 * (1 + beta) / SHARPNESS
        u, _, worst = ride(np.full(400, 0.3), rate, np.full(400, beta))
        u = np.where(np.asarray(worst) <= 0.2, np.asarray(u), -np.inf)
        best = int(u.argmax())
        law = rate[best] / (1 - beta) * SLOPE * STEPS
        rows.append(dict(beta=beta, distance=round(float(u[best]), 2),
                         eta_lambda=round(float(rate[best] * SHARPNESS), 3),
                         of_drift_law=round(float(u[best] / law), 3)))
    for row in rows:
        row["of_gradient_descent"] = round(row["distance"] / rows[0]["distance"], 2)
    return rows


def suggested() -> list[dict]:
    spectrum, noise, steps, chains = np.array([1000.0, 300.0, 100.0]), 2.0, 4000, 200
    valley = river_valley_nd(
        jax.random.key(1), 3, jnp.asarray(spectrum), (0.0, 1.0), slope=SLOPE,
        noise_scale=jnp.array([0.0, noise, noise, noise]),
    )

    @jax.jit
    def measure(gamma):
        setting = suggest(spectrum.max(), gamma)

        def one(key, decays):
            last = steps // 5
            share = lambda t: jnp.where(decays, jnp.clip((steps - t) / last, 0.0, 1.0), 1.0)
            opt = heavy_ball(lambda t: setting.learning_rate * share(t), setting.decay)

            def body(carry, key):
                x, state = carry
                update, state = opt.update(valley.gradient(key, x), state)
                x = x + update
                return (x, state), 0.5 * jnp.sum(valley.spectrum * valley.split(x)[1] ** 2)

            x = valley.join(0.0, jnp.zeros(3))
            return jax.lax.scan(body, (x, opt.init(x)), jax.random.split(key, steps))[1]

        keys = jax.random.split(jax.random.key(2), chains)
        plain = jax.vmap(lambda key: one(key, False))(keys)[:, -1000:].mean()
        return setting, plain, jax.vmap(lambda key: one(key, True))(keys)[:, -1].mean()

    rows = []
    for gamma in (0.0005, 0.005, 0.02, 0.1):
        (rate, beta), plain, decayed = measure(gamma)
        theory = np.sum(spectrum * np.asarray(hill_variance(spectrum, rate, beta, noise))) / 2
        rows.append(dict(gamma=gamma, beta=round(float(beta), 3), excess=float(plain),
                         theory=float(theory), bound=gamma * 3 * noise**2 / 2,
                         after_decay=float(decayed)))
    return rows


def halpern_gain(n: int) -> float:
    weight, total = 1.0, 0.0
    for k in range(n - 2, -1, -1):
        share = (k + 1) / (k + 2)
        total, weight = total + 4 * (weight * share) ** 2, -weight * share
    return total


def gain() -> list[dict]:
    disk = np.exp(1j * np.linspace(0, np.pi, 401)) * np.linspace(0, 1, 21)[:, None]
    return [dict(num_steps=n, dual_anchor=round(float(noise_gain(n, disk).max()), 4),
                 ohm=round(halpern_gain(n), 2)) for n in (16, 64, 256, 1024)]


def follow(opt, field, y0, inputs):
    def body(carry, e):
        y, state = carry
        update, state = opt.update(field(y, e), state)
        return (y + update, state), None

    return jax.lax.scan(body, (y0, opt.init(y0)), inputs)[0][0]


def ohm(field, eta, y0, inputs):
    """Halpern's method on ``I - eta F``."""
    def body(x, k_e):
        k, e = k_e
        return y0 / (k + 2) + (k + 1) / (k + 2) * (x - eta * field(x, e)), None

    count = jax.tree.leaves(inputs)[0].shape[0]
    return jax.lax.scan(body, y0, (jnp.arange(float(count)), inputs))[0]


def rivals(field, eta, n, y0, inputs):
    """Ends of dual-anchor, OHM and the plain iteration after ``n - 1`` evaluations."""
    return dict(dual_anchor=follow(dual_anchor(eta, n), field, y0, inputs),
                ohm=ohm(field, eta, y0, inputs), sgd=follow(optax.sgd(eta), field, y0, inputs))


def random_skew(key, d):
    s = np.asarray(jax.random.normal(key, (d, d)), np.float64)
    return s - s.T


def horizon() -> list[dict]:
    d, seeds = 20, 64
    s = random_skew(jax.random.key(3), d) / np.sqrt(d)
    q = np.linalg.solve(np.eye(d) + s, np.eye(d) - s)
    matrix = jnp.asarray(np.eye(d) - q, jnp.float32)
    field = lambda y, e: y @ matrix.T - e
    y0 = jnp.ones((seeds, d)) / jnp.sqrt(d)
    rows = []
    for n, sigma in [(2**i, 2.0**-i) for i in range(3, 10)] + [(10_000, 0.01)]:
        @jax.jit
        def run(key, n=n, sigma=sigma):
            noise = sigma / jnp.sqrt(d) * jax.random.normal(key, (n - 1, seeds, d))
            ends = rivals(field, 1.0, n, y0, noise)
            # Krasnoselskii-Mann averaging in the place of the plain iteration
            ends["km"] = follow(optax.sgd(0.5), field, y0, noise)
            del ends["sgd"]
            return {k: jnp.linalg.norm(y @ matrix.T, axis=1).mean() for k, y in ends.items()}

        found = {k: float(v) for k, v in run(jax.random.key(n)).items()}
        rows.append(dict(num_steps=n, sigma=sigma,
                         **{k: round(n * v, 3) for k, v in found.items()},
                         residual_dual_anchor=found["dual_anchor"], residual_ohm=found["ohm"]))
    return rows


def monotone() -> list[dict]:
    d, seeds, mu = 20, 64, 0.3
    s = random_skew(jax.random.key(5), d)
    matrix = mu * np.eye(d) + s / np.linalg.norm(s, 2)
    eta = mu / np.linalg.norm(matrix, 2) ** 2
    matrix = jnp.asarray(matrix, jnp.float32)
    field = lambda y, e: y @ matrix.T + e
    y0 = jnp.ones((seeds, d)) / jnp.sqrt(d)
    rows = []
    for n in (800, 3200, 12800):
        @jax.jit
        def run(key, n=n):
            noise = 0.3 / np.sqrt(n * d) * jax.random.normal(key, (n - 1, seeds, d))
            ends = rivals(field, eta, n, y0, noise)
            return {k: jnp.linalg.norm(y @ matrix.T, axis=1).mean() for k, y in ends.items()}

        rows.append(dict(num_steps=n, **{k: float(v) for k, v in run(jax.random.key(6)).items()}))
    for row, before in zip(rows[1:], rows):
        row["dual_slope"] = round(float(
            np.log(row["dual_anchor"] / before["dual_anchor"])
            / np.log(row["num_steps"] / before["num_steps"])), 3)
    return rows


def logistic() -> list[dict]:
    from sklearn.datasets import load_breast_cancer, load_digits

    rows, shares = [], (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.5, 2.0)
    for name, load in (("digits, 0-4 | 5-9", load_digits), ("breast cancer", load_breast_cancer)):
        x, y = load(return_X_y=True)
        y = np.where(y >= 5 if "digits" in name else y > 0, 1.0, -1.0)
        x = (x - x.mean(0)) / (x.std(0) + 1e-6)
        lmax = float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]) / 4
        x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        grad = jax.grad(lambda w, x, y: jnp.mean(jax.nn.softplus(-y * (x @ w))))
        for batch in (8, 32, 128, 512):
            @jax.jit
            def run(keys, x=x, y=y, lmax=lmax, grad=grad, batch=batch):
                def one(share, key):
                    picks = jax.random.randint(key, (199, batch), 0, len(y))
                    field = lambda w, i: grad(w, x[i], y[i])
                    ends = [follow(opt, field, jnp.zeros(x.shape[1]), picks) for opt in
                            (dual_anchor(share / lmax, 200), optax.sgd(share / lmax))]
                    return jnp.stack([jnp.linalg.norm(grad(w, x, y)) for w in ends])

                each = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
                return each(jnp.array(shares), keys).mean(1).T

            ours, theirs = np.asarray(run(jax.random.split(jax.random.key(7), 20)))
            at = shares.index(1.0)
            rows.append(dict(
                data=name, batch=batch, ratio_at_1_over_L=round(float(ours[at] / theirs[at]), 3),
                ratio_at_2_over_L=round(float(ours[-1] / theirs[-1]), 3),
                ratio_both_tuned=round(float(ours.min() / theirs.min()), 3),
                dual_anchor=[round(float(v), 5) for v in ours],
                sgd=[round(float(v), 5) for v in theirs], eta_times_L=list(shares),
            ))
    return rows


PARTS = dict(edge=edge, drift=drift, variance=variance, curved=curved, suggest=suggested,
             gain=gain, horizon=horizon, monotone=monotone, logistic=logistic)


def run(out: str | os.PathLike = RESULTS, parts=tuple(PARTS), *, again: bool = False) -> dict:
    """Run the parts that are not yet in ``out``; returns everything that stands there then."""
    out = Path(out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in parts:
        if name not in PARTS:
            raise ValueError(f"parts: expected some of {', '.join(PARTS)}, got {name!r}")
        if again or name not in results:
            results[name] = PARTS[name]()
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = out.with_suffix(".tmp")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            temporary.replace(out)
        print(f"\n{name}")
        print(table(results[name]))
    return results


def table(rows: list[dict]) -> str:
    """A line per row; lists (whole grids) stand in the file only."""
    names = list(dict.fromkeys(
        k for row in rows for k, v in row.items() if not isinstance(v, list)
    ))
    show = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)
    cells = [names] + [[show(row.get(k, "")) for k in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    run(args.out, args.parts.split(","), again=args.again)


if __name__ == "__main__":
    main()
