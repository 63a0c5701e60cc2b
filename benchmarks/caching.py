"""Benchmark of feature caching on the digits DiT and on DiT-S/2.

    python benchmarks/caching.py                 # everything, about an hour on two cores
    python benchmarks/caching.py --only table    # one part

Parts: ``table`` (errors at equal evaluations, site output), ``module`` (inside the model),
``samplers`` (FADE on top of AB2 and DPM-Solver++), ``stability`` (size of the profiling
batch), ``ablation`` (what in FADE makes the difference), ``wall`` (measured against ideal
speed-up on DiT-S/2), and those of ``benchmarks/field.py``: ``field`` (every method, DiT and
MMDiT), ``bars`` (BeziCast and FuCa), ``headline`` (largest speed-up within a tolerance),
``memory`` (bytes cached at each site), ``compile`` (compile times).

Errors are relative to the full 50-step run. Three models are trained from different seeds
(kept in ``benchmarks/.cache``); profiling and test noise are fresh for each. Intervals are
95 % bootstrap intervals, over training seeds and then samples. Results are merged into
``benchmarks/results/caching.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import field
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.caching import (
    FadeGrid,
    cached_sample,
    fade_plan,
    make_plan,
    profile_fade,
    profile_gram,
    profile_least_squares,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.compare import GRID_METHODS, label_task, method_plan, relative_error
from fadex.data import load_images
from fadex.models import (
    DIGITS_SHAPE,
    NULL_DIGIT,
    DiT,
    DiTConfig,
    digits_dit,
    from_nnx,
    load_digits_dit,
    save_digits_dit,
)
from fadex.sampling import ab2, dpmpp_2m, flow_euler, sample, train_flow, uniform_times

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "caching.json"
STEPS = 50
INTERVALS = (3, 4, 5, 6, 8)
GUIDANCES = (1.0, 3.0)


def trained(seed: int, steps: int):
    """The digits DiT trained from ``seed``, from the cache when it is there."""
    path = HERE / ".cache" / f"digits_{seed}_{steps}"
    if not path.exists():
        images = load_images("digits", split="train")
        denoiser, params = from_nnx(digits_dit(seed))
        state, losses = train_flow(
            denoiser, params, images.images, images.labels, key=jax.random.key(seed),
            null_label=NULL_DIGIT, steps=steps,
        )
        print(f"trained seed {seed}: loss {float(losses[-100:].mean()):.3f}", flush=True)
        save_digits_dit(path, state.ema)
    return load_digits_dit(path)


def make_task(seed: int, args):
    """Model ``seed`` with test and profiling noise of its own."""
    denoiser, params = trained(seed, args.train_steps)
    return label_task(
        denoiser, params, shape=DIGITS_SHAPE, num_classes=10, samples=args.samples,
        seed=7000 + seed, profile_samples=args.profile_samples,
    )


def interval_of(per_seed: list[np.ndarray], against: list[np.ndarray] | None = None):
    """Mean over seeds, or ratio of means, with a 95 % bootstrap interval."""
    rng = np.random.default_rng(0)

    def statistic(seeds, pick):
        top = np.mean([per_seed[i][pick[i]].mean() for i in seeds])
        if against is None:
            return top
        return top / np.mean([against[i][pick[i]].mean() for i in seeds])

    count = len(per_seed)
    everything = [np.arange(len(e)) for e in per_seed]
    draws = []
    for _ in range(1000):
        seeds = rng.integers(0, count, count)
        picks = [rng.integers(0, len(e), len(e)) for e in per_seed]
        draws.append(statistic(seeds, picks))
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(statistic(range(count), everything)), float(low), float(high)


def run_methods(tasks, methods, *, site="output", sampler=None, guidances=GUIDANCES,
                intervals=INTERVALS, plans=None):
    """Per-sample errors ``{(guidance, interval, method): [per seed [B]]}``."""
    sampler = flow_euler() if sampler is None else sampler
    timesteps = uniform_times(STEPS)
    errors: dict = {}
    for guidance in guidances:
        for task in tasks:
            batch = (task.denoiser, task.params, task.x, task.cond)
            shared = dict(guidance=guidance, null_cond=task.null_cond)
            full = sample(*batch, timesteps=timesteps, sampler=sampler, **shared)
            for interval in intervals:
                schedule = uniform_schedule(STEPS, interval)
                for name in methods:
                    if name in GRID_METHODS:
                        grid = GRID_METHODS[name]()
                        steps = max(schedule.nfe // grid.evals_per_step, 1)
                        out = sample(
                            *batch, timesteps=uniform_times(steps), sampler=grid, **shared
                        )
                    else:
                        make = method_plan if plans is None or name not in plans else plans[name]
                        plan = make(
                            name, schedule, task, timesteps=timesteps, sampler=sampler,
                            site=site, guidance=guidance,
                        )
                        out = cached_sample(
                            *batch, timesteps=timesteps, sampler=sampler, plan=plan, site=site,
                            **shared,
                        )
                    key = (guidance, interval, name)
                    errors.setdefault(key, []).append(relative_error(out, full))
    return errors


def tabulate(title, errors, methods, guidances=GUIDANCES, intervals=INTERVALS, base="taylor1"):
    """Print the table; return its rows."""
    print(f"\n{title}")
    print("guidance  N (NFE)  " + "  ".join(f"{m:>14}" for m in methods))
    rows = []
    for guidance in guidances:
        for interval in intervals:
            nfe = uniform_schedule(STEPS, interval).nfe
            cells = []
            for name in methods:
                mean, low, high = interval_of(errors[guidance, interval, name])
                ratio = interval_of(
                    errors[guidance, interval, name], errors[guidance, interval, base]
                )
                rows.append(
                    dict(guidance=guidance, interval=interval, nfe=nfe, method=name,
                         rel_error=mean, low=low, high=high, ratio=ratio[0],
                         ratio_low=ratio[1], ratio_high=ratio[2], ratio_to=base)
                )
                cells.append(f"{mean:.4f} ({ratio[0]:4.2f})")
            line = "  ".join(f"{cell:>14}" for cell in cells)
            print(f"{guidance:8g}  {interval:2d} ({nfe:2d})  {line}", flush=True)
    return rows


def part_table(tasks, args):
    methods = ["reuse", "taylor1", "taylor2", "hicache2", "lsq", "fade_open", "fade",
               "fade_amplitude", "ab2", "dpmpp_2m"]
    errors = run_methods(tasks, methods)
    rows = tabulate("relative error (ratio to TaylorSeer-1), site output", errors, methods)
    for guidance in GUIDANCES:
        for n in INTERVALS:
            ours = errors[guidance, n, "fade"]
            fade, low, high = interval_of(ours, errors[guidance, n, "taylor1"])
            grid = interval_of(ours, errors[guidance, n, "ab2"])[0]
            verdict = "met" if fade <= 0.85 else "MISSED"
            print(f"guidance {guidance:g} N={n}: FADE / Taylor-1 = {fade:.3f} "
                  f"[{low:.3f}, {high:.3f}] (bar 0.85 {verdict}); FADE / AB2 grid = {grid:.3f}",
                  flush=True)
    return rows


def part_module(tasks, args):
    methods = ["reuse", "taylor1", "taylor2", "lsq", "fade"]
    errors = run_methods(tasks, methods, site="module")
    rows = tabulate("relative error (ratio to TaylorSeer-1), site module", errors, methods)
    errors = run_methods(tasks, methods, site="crf", intervals=(6, 8), guidances=(1.0,))
    rows_crf = tabulate("relative error, site crf", errors, methods, (1.0,), (6, 8))
    return dict(module=rows, crf=rows_crf)


def part_samplers(tasks, args):
    out = {}
    for name, sampler in (("ab2", ab2()), ("dpmpp_2m", dpmpp_2m())):
        methods = ["taylor1", "fade", name]
        errors = run_methods(tasks, methods, sampler=sampler, intervals=(3, 4, 6, 8))
        out[name] = tabulate(
            f"on top of {name}: error to its own full run; last column its coarse grid", errors,
            methods, intervals=(3, 4, 6, 8),
        )
    return out


def part_stability(tasks, args):
    sizes = (1, 4, 16, 64)

    def sized(count, mode):
        def make(name, schedule, task, *, timesteps, sampler, site, guidance):
            small = task._replace(
                profile_x=task.profile_x[:count], profile_cond=task.profile_cond[:count],
                profile_null=task.profile_null[:count],
            )
            return fade_plan(profile_fade(
                small.denoiser, small.params, small.profile_x, small.profile_cond,
                timesteps=timesteps, schedule=schedule, sampler=sampler, site=site, mode=mode,
                guidance=guidance, null_cond=small.profile_null,
            ))
        return make

    plans = {f"{mode}_{n}": sized(n, mode) for mode in ("open", "closed") for n in sizes}
    methods = ["taylor1", *plans]
    errors = run_methods(tasks, methods, plans=plans, intervals=(4, 6, 8))
    rows = []
    for mode in ("open", "closed"):
        rows += tabulate(
            f"profiling samples, {mode} (ratio to 64)", errors, [f"{mode}_{n}" for n in sizes],
            intervals=(4, 6, 8), base=f"{mode}_64",
        )
    small = {"open": "open_1", "closed": "closed_4"}
    for mode, name in small.items():
        keys = [k for k in errors if k[2] == name]
        ratio = np.mean([
            np.mean(errors[k]) / np.mean(errors[k[0], k[1], f"{mode}_64"]) for k in keys
        ])
        print(f"{name} / {mode}_64, mean over settings: {ratio:.3f} (bar 1.10)", flush=True)
    return rows


def part_ablation(tasks, args):
    grid = FadeGrid()
    zero = dict(lams_base=(0.0,), lams_memory=(0.0,))
    variants = {
        "full grid": {},
        "lam = 0": dict(grid=grid._replace(**zero)),
        "alpha = 1": dict(grid=grid._replace(alphas=(1.0,))),
        "integer only": dict(grid=grid._replace(alphas=(1.0,), **zero)),
        "no drift term": dict(drift=0.0),
        "lam=0 + rho": dict(grid=grid._replace(**zero), amplitude=True),
    }

    def variant(options):
        def make(name, schedule, task, *, timesteps, sampler, site, guidance):
            return fade_plan(profile_fade(
                task.denoiser, task.params, task.profile_x, task.profile_cond,
                timesteps=timesteps, schedule=schedule, sampler=sampler, site=site,
                guidance=guidance, null_cond=task.profile_null, **options,
            ))
        return make

    def floor(name, schedule, task, *, timesteps, sampler, site, guidance):
        return profile_least_squares(
            task.denoiser, task.params, task.profile_x, task.profile_cond, mode="closed",
            timesteps=timesteps, schedule=schedule, sampler=sampler, guidance=guidance,
            null_cond=task.profile_null,
        )

    plans = {name: variant(options) for name, options in variants.items()}
    plans["lsq closed"] = floor
    methods = ["taylor1", *plans]
    errors = run_methods(tasks, methods, plans=plans, guidances=(1.0,), intervals=(4, 6, 8))
    return tabulate("ablation, closed loop", errors, methods, (1.0,), (4, 6, 8))


def part_heterogeneity(tasks, args):
    """Open error of a table per layer against one parameter set for all layers, held out."""
    from fadex.caching.fade import candidate_weights
    from fadex.caching.profile import gram_errors

    grid = FadeGrid()
    better, gains = [], []
    for task in tasks:
        for interval in (5, 6, 8):
            schedule = uniform_schedule(STEPS, interval)
            shared = dict(timesteps=uniform_times(STEPS), schedule=schedule, site="module")
            model = (task.denoiser, task.params)
            fit = profile_gram(*model, task.profile_x, task.profile_cond, **shared)
            held = profile_gram(*model, task.x, task.cond, **shared)
            layers = fit.gram.shape[1]
            own, one = np.zeros(layers), np.zeros(layers)
            for s in schedule.skipped:
                weights, valid = candidate_weights(schedule.history(s, 4), s, grid)
                penalty = np.where(valid, 0.0, np.inf)
                train = np.stack([gram_errors(fit.gram[s, g], weights) for g in range(layers)])
                test = np.stack([gram_errors(held.gram[s, g], weights) for g in range(layers)])
                scale = fit.gram[s, :, -1, -1]
                best = np.argmin(train + penalty, axis=1)
                shared_best = np.argmin((train / scale[:, None]).sum(0) + penalty)
                own += test[np.arange(layers), best]
                one += test[:, shared_best]
            better.append(np.mean(own <= one))
            gains.append(np.mean(own / one))
    print(f"\nper-layer table at least as good as one shared set on {100 * np.mean(better):.0f} % "
          f"of layers (held out); squared error ratio {np.mean(gains):.3f}", flush=True)
    return dict(share=float(np.mean(better)), error_ratio=float(np.mean(gains)))


def part_wall(tasks, args):
    """Measured speed-up of the cached sampler against S / NFE, in interleaved pairs.

    DiT-S/2 with random weights (only time counts) and the shipped digits DiT.
    """
    del tasks
    config = DiTConfig.named("S/2", in_channels=4, scan_layers=True)
    models = {
        "DiT-S/2": (*from_nnx(DiT(config, rngs=nnx.Rngs(0))), (1, 32, 32, 4)),
        "digits DiT": (*load_digits_dit(), (64, *DIGITS_SHAPE)),
    }
    rows = []
    for name, (denoiser, params, shape) in models.items():
        x = jax.random.normal(jax.random.key(0), shape)
        cond = jnp.zeros(shape[:1], jnp.int32)
        for interval in args.wall_intervals:
            rows.append(_time_pairs(name, denoiser, params, x, cond, interval, args.pairs))
    return rows


def _time_pairs(name, denoiser, params, x, cond, interval, count):
    timesteps, schedule = uniform_times(STEPS), uniform_schedule(STEPS, interval)
    plan = make_plan(schedule, taylorseer(1))
    full = lambda: sample(denoiser, params, x, cond, timesteps=timesteps)
    cached = lambda: cached_sample(denoiser, params, x, cond, timesteps=timesteps, plan=plan)
    for call in (full, cached):
        jax.block_until_ready(call())
    pairs = []
    for _ in range(count):
        times = []
        for call in (full, cached):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        pairs.append(times[0] / times[1])
    ideal, measured = STEPS / schedule.nfe, statistics.median(pairs)
    print(f"{name} N={interval}: measured {measured:.2f}x, ideal S/NFE {ideal:.2f}x, "
          f"efficiency {measured / ideal:.3f} (bar 0.9), {count} pairs", flush=True)
    return dict(model=name, interval=interval, nfe=schedule.nfe, ideal=ideal, measured=measured,
                efficiency=measured / ideal, pairs=pairs)


PARTS = {
    **field.PARTS,
    "table": part_table,
    "module": part_module,
    "samplers": part_samplers,
    "stability": part_stability,
    "ablation": part_ablation,
    "heterogeneity": part_heterogeneity,
    "wall": part_wall,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--train-seeds", type=int, default=3)
    parser.add_argument("--train-steps", type=int, default=1500)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--profile-samples", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--wall-intervals", type=int, nargs="+", default=[5])
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    tasks = []
    if set(names) - {"wall", "memory", "compile"}:
        tasks = [make_task(seed, args) for seed in range(args.train_seeds)]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        results[name] = PARTS[name](tasks, args)
        results.setdefault("settings", {})[name] = vars(args) | {"jax": jax.__version__}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwrote {RESULTS}")


if __name__ == "__main__":
    main()
