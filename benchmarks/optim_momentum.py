"""Momentum from the batch size: exact rates, randomized Kaczmarz, and a network on digits.

    python benchmarks/optim_momentum.py [--parts exact,kaczmarz,...] [--again]

* ``exact``: steps per e-fold on three spectra of Gaussian rows, by the exact oracle: plain SGD and
  heavy ball at their best on a grid, and the rule with c = 1, with c = 4/3, and with the trace in
  place of R^2;
* ``unstable``: random problems out of 8000 (a spectrum, a batch size, with and without mu) that
  the rule makes unstable, for several c and s, with R^2 and with the trace;
* ``kaczmarz``: steps of randomized Kaczmarz to an error of 1e-3 on 2000 x 30 rows, 8 seeds;
* ``digits``: cross-entropy of a 64-64-10 network on the 1442 training digits after 20 epochs.
  The learning rate is 1/lmax, measured at the start, for all. ``law``: no momentum at batch 16, and
  1 - beta like 1/B from there: its loss over that at batch 16, after as many examples. ``scaled``:
  momentum tuned on a grid at batch 16 on 2 seeds, 1 - beta like 1/B with a floor of 0.05, over the
  best momentum of the grid at each batch size; ``floor_0.01``: with a floor whose memory is as long
  as the run at batch 256. ``plain``: no momentum, with a learning rate tuned at each batch size,
  over ``scaled``. Geometric means of ratios paired over 6 fresh seeds, with the standard error of
  their logarithm;
* ``estimated``: the same runs with learning rate and momentum from constants measured at the
  start (no tuning at all).

A part that stands in ``benchmarks/results/optim_momentum.json`` is not run again without
``--again``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.data import load_images
from fadex.optim import (
    best_rate,
    curvature_from_rows,
    gauss_newton_rows,
    interpolation_momentum,
    kaczmarz,
    scale_momentum,
    second_moment_rate,
    sgd_momentum,
    steps_per_efold,
)

RESULTS = Path(__file__).parent / "results" / "optim_momentum.json"
SPECTRA = {
    "geo": np.geomspace(1, 1e-3, 20),
    "flat": np.r_[np.ones(19), 1e-3],
    "pow": np.geomspace(1, 1e-4, 60),
}
BATCHES = (1, 4, 16, 64, 256, 1024)


@functools.partial(jax.jit, static_argnames=("style", "use_mu"))
def rule_steps(lam, batch_size, c, s, excess, style="heavy_ball", use_mu=True):
    """Steps per e-fold by the rule, with ``R^2 = trace + excess * lmax``."""
    mu = jnp.min(jnp.where(lam > 0, lam, jnp.inf)) if use_mu else None
    r2 = jnp.sum(lam) + excess * jnp.max(lam)
    m = interpolation_momentum(batch_size, r2, jnp.max(lam), mu, style=style, c=c, s=s)
    return steps_per_efold(second_moment_rate(lam, m.learning_rate, m.decay, batch_size, style))


@functools.partial(jax.jit, static_argnames="momentum")
def grid_steps(lam, batch_size, momentum):
    noise = 2 * batch_size / (jnp.sum(lam) + 2 * jnp.max(lam))
    top = jnp.minimum(noise, 4.0 if momentum else 2.0) / jnp.max(lam)
    etas = top * jnp.geomspace(1e-2, 1, 48 if momentum else 512)
    decays = 1 - jnp.geomspace(2e-3, 1, 48) if momentum else jnp.zeros(1)
    return steps_per_efold(best_rate(lam, batch_size, etas, decays).rate)


def exact() -> dict:
    table = {}
    with jax.enable_x64(True):
        for name, spectrum in SPECTRA.items():
            lam = jnp.asarray(spectrum)
            rows = []
            for b in BATCHES:
                b = float(b)
                rows.append({
                    "batch": b, "best_sgd": grid_steps(lam, b, False),
                    "best_heavy_ball": grid_steps(lam, b, True),
                    "rule": rule_steps(lam, b, 1.0, 0.5, 2.0),
                    "rule_nesterov": rule_steps(lam, b, 1.0, 0.5, 2.0, style="nesterov"),
                    "rule_c4/3": rule_steps(lam, b, 4 / 3, 0.5, 2.0),
                    "rule_nesterov_c4/3": rule_steps(lam, b, 4 / 3, 0.5, 2.0, style="nesterov"),
                    "rule_trace": rule_steps(lam, b, 1.0, 0.5, 0.0),
                })
            table[name] = {
                "rank": float(lam.sum()), "saturation": float(lam.sum() / np.sqrt(lam.min())),
                "rows": [{k: round(float(v), 1) for k, v in row.items()} for row in rows],
            }
    return table


def unstable() -> dict:
    rng = np.random.default_rng(7)
    lam = 10 ** rng.uniform(-4, 0, (4000, 8)) * (np.arange(8) < rng.integers(1, 9, (4000, 1)))
    batch = 10 ** rng.uniform(0, np.log10(3000), 4000)
    found = {}
    with jax.enable_x64(True):
        for style in ("heavy_ball", "nesterov"):
            for c, s, excess in ((1, 0.5, 2), (4 / 3, 0.5, 2), (1.5, 0.5, 2), (1.75, 0.5, 2),
                                 (1, 1, 2), (1, 1.3, 2), (1, 0.5, 0)):
                count = 0
                for use_mu in (True, False):
                    steps = jax.vmap(functools.partial(rule_steps, style=style, use_mu=use_mu),
                                     in_axes=(0, 0, None, None, None))
                    count += int(jnp.isinf(steps(lam, batch, c, s, excess)).sum())
                bound = "R2" if excess else "trace"
                found[f"{style} c={c:.2f} s={s} {bound}"] = count
    return {"problems": 8000, "unstable": found}


def kaczmarz_steps() -> dict:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((2000, 30)) * np.geomspace(1, 1 / 20.5, 30)
    A /= np.linalg.norm(A, axis=1, keepdims=True)
    values = np.linalg.eigvalsh(A.T @ A / 2000)
    A, x = jnp.asarray(A, jnp.float32), jnp.asarray(rng.standard_normal(30), jnp.float32)

    def steps(batch_size, momentum, style, limit):
        @jax.jit
        @jax.vmap
        def error(key):
            return kaczmarz(
                A, A @ x, key, batch_size=batch_size, momentum=momentum, style=style,
                num_steps=limit, record=lambda z: jnp.linalg.norm(z - x) / jnp.linalg.norm(x),
            ).history

        below = np.asarray(error(jax.random.split(jax.random.key(0), 8))) < 1e-3
        return float(np.median(below.argmax(1) + 1)) if below.any(1).all() else float("inf")

    rows = []
    for b in (1, 2, 4, 8, 16, 32, 64, 128):
        limit = 12000 // min(b, 24) + 100
        rows.append({
            "batch": b, "heavy_ball": steps(b, "auto", "heavy_ball", limit),
            "nesterov": steps(b, "auto", "nesterov", limit),
            "plain": steps(b, None, "heavy_ball", max(limit, 5000)),
        })
    kappa = values[-1] / values[0]
    return {"condition": kappa, "rank": 1 / values[-1],
            "saturation": np.sqrt(kappa) / values[-1], "rows": rows}


# -- digits ----------------------------------------------------------------------------------------
EPOCHS, BASE = 20, 16
DIGIT_BATCHES = (16, 32, 64, 128, 256)
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
PLAIN_RATES = (0.15, 0.3, 0.6, 0.9, 1.2, 1.8)
TUNING, FRESH = (0, 1), (20, 21, 22, 23, 24, 25)


@functools.cache
def digits():
    data = load_images("digits")
    x = np.asarray(data.images, np.float32).reshape(len(data.images), -1)
    return (x - x.mean()) / x.std(), np.asarray(data.labels)


def logits(params, x):
    hidden = jax.nn.relu(x @ params["u"] + params["a"])
    return hidden @ params["v"] + params["b"]


def fresh_params(key):
    u, v = jax.random.split(key)
    d = digits()[0].shape[1]
    return {"u": jax.random.normal(u, (d, 64)) * np.sqrt(2 / d), "a": jnp.zeros(64),
            "v": jax.random.normal(v, (64, 10)) * np.sqrt(1 / 64), "b": jnp.zeros(10)}


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


@functools.partial(jax.jit, static_argnames="batch_size")
def train(rates, decays, seeds, batch_size):
    """Final training loss ``[n, seeds]`` for pairs ``rates, decays`` of ``[n]`` or ``[n, seeds]``.

    A seed fixes the start and the order of the examples for every pair.
    """
    x, y = map(jnp.asarray, digits())
    steps = EPOCHS * len(x) // batch_size

    def one(rate, decay, seed):
        key = jax.random.key(seed)
        params = fresh_params(jax.random.fold_in(key, 0))
        order = jnp.concatenate([
            jax.random.permutation(jax.random.fold_in(key, e + 1), len(x)) for e in range(EPOCHS)
        ])[: steps * batch_size].reshape(steps, batch_size)
        tx = sgd_momentum(rate, decay)

        def step(carry, batch):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, x[batch], y[batch]), state)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), order)
        final = loss(params, x, y)
        return jnp.where(jnp.isfinite(final), final, 1e3)

    rates, decays = jnp.asarray(rates, jnp.float32), jnp.asarray(decays, jnp.float32)
    per_seed = 0 if rates.ndim == 2 else None
    seeded = jax.vmap(one, in_axes=(per_seed, per_seed, 0))
    return jax.vmap(seeded, in_axes=(0, 0, None))(rates, decays, jnp.asarray(seeds))


def paired(losses, best):
    """Geometric mean of the ratio to ``best`` seed by seed, and the standard error of its log."""
    ratio = np.log(np.asarray(losses) / np.asarray(best))
    return [float(np.exp(ratio.mean())), float(ratio.std(ddof=1) / np.sqrt(len(ratio)))]


def geometric(losses):
    return np.exp(np.mean(np.log(np.asarray(losses)), -1))


@jax.jit
def constants(seeds):
    """Curvature of each seed's network at its start, with R^2 the safe and the Gaussian way."""
    x = jnp.asarray(digits()[0])

    def one(seed):
        params = fresh_params(jax.random.fold_in(jax.random.key(seed), 0))
        rows = gauss_newton_rows(logits, params, x[::9], loss="cross_entropy")
        return curvature_from_rows(rows), curvature_from_rows(rows, method="gaussian")

    return jax.vmap(one)(jnp.asarray(seeds))


def digits_part() -> dict:
    rate = 1 / float(constants(TUNING)[0].lmax.mean())
    tuned = geometric(train(np.full(len(DECAYS), rate), DECAYS, TUNING, BASE))
    decay = DECAYS[tuned.argmin()]
    found = {"learning_rate": rate, "tuned_decay": decay, "rows": []}
    for b in DIGIT_BATCHES:
        chosen = [float(scale_momentum(start, BASE, b, min_decay=floor))
                  for start, floor in ((0.0, 0.01), (decay, 0.05), (decay, 0.01))]
        decays = np.array([*DECAYS, *chosen])
        losses = np.asarray(train(np.full(len(decays), rate), decays, FRESH, b))
        grid, (law, scaled, low) = losses[:-3], losses[-3:]
        best = geometric(grid).argmin()
        if b == BASE:
            reference = law
        zeros = np.zeros(len(PLAIN_RATES))
        plain_rate = PLAIN_RATES[geometric(train(PLAIN_RATES, zeros, TUNING, b)).argmin()]
        plain = np.asarray(train([plain_rate], [0.0], FRESH, b))[0]
        found["rows"].append({
            "batch": b, "law_decay": chosen[0], "law_loss": float(geometric(law)),
            "law_over_base": paired(law, reference),
            "no_momentum_over_base": paired(grid[0], reference),
            "scaled_decay": chosen[1], "scaled_loss": float(geometric(scaled)),
            "best_decay": DECAYS[best], "scaled_over_best": paired(scaled, grid[best]),
            "floor_0.01_over_best": paired(low, grid[best]),
            "fixed_decay_over_best": paired(grid[DECAYS.index(decay)], grid[best]),
            "plain_rate": float(plain_rate), "plain_over_scaled": paired(plain, scaled),
        })
    return found


def estimated() -> dict:
    safe, typical = constants(FRESH)
    found = {"lmax": float(safe.lmax.mean()), "trace": float(safe.trace.mean()),
             "R2_max": float(safe.row_norm_bound.mean()),
             "R2_gaussian": float(typical.row_norm_bound.mean()), "rows": []}
    for b in DIGIT_BATCHES:
        row = {"batch": b}
        for name, constant in (("max", safe), ("gaussian", typical)):
            rule = jax.vmap(functools.partial(interpolation_momentum, b))(
                constant.row_norm_bound, constant.lmax)
            losses = train(rule.learning_rate[None], rule.decay[None], FRESH, b)[0]
            row[name] = {"learning_rate": float(rule.learning_rate.mean()),
                         "decay": float(rule.decay.mean()), "loss": float(geometric(losses))}
        found["rows"].append(row)
    return found


PARTS = {"exact": exact, "unstable": unstable, "kaczmarz": kaczmarz_steps,
         "digits": digits_part, "estimated": estimated}


def run(out: str | os.PathLike = RESULTS, parts=tuple(PARTS), *, again: bool = False) -> dict:
    """Run what is missing and write the file after each part."""
    out = Path(out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in parts:
        if again or name not in results:
            results[name] = PARTS[name]()
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = out.with_suffix(".tmp")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            temporary.replace(out)
            print(f"{name}: done", flush=True)
    return results


def show(results: dict) -> None:
    for name, part in results.get("exact", {}).items():
        print(f"\n{name}: rank {part['rank']:.1f}, saturation {part['saturation']:.0f}")
        _table(part["rows"])
    for name, count in results.get("unstable", {}).get("unstable", {}).items():
        print(f"{name}: {count} of {results['unstable']['problems']} unstable")
    for name in ("kaczmarz", "digits", "estimated"):
        if name in results:
            print(f"\n{name}:", {k: v for k, v in results[name].items() if k != "rows"})
            _table(results[name]["rows"])


def _table(rows):
    def text(v):
        if isinstance(v, list):
            return f"{v[0]:.3f}+-{v[1]:.3f}"
        return " ".join(f"{x:.4g}" for x in v.values()) if isinstance(v, dict) else f"{v:.5g}"

    columns = [[k, *(text(row[k]) for row in rows)] for k in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns):
        print("  ".join(cell.rjust(w) for cell, w in zip(line, widths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: unknown {sorted(unknown)}, expected some of {list(PARTS)}")
    show(run(args.out, parts, again=args.again))


if __name__ == "__main__":
    main()
