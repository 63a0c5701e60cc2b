"""The whole field of caching methods: parts of ``benchmarks/caching.py``.

* ``field``: every method at N = 5 and 8 on the digits DiT and on the digits MMDiT (three text
  tokens, double and single blocks);
* ``bars``: what BeziCast and FuCa must show against TaylorSeer-1;
* ``headline``: per method the largest speed-up ``S / NFE`` over N = 2 .. 24 at which the mean
  relative error stays within 0.02 and within 0.05;
* ``compile``: compile time of each cached sampler over that of one model step;
* ``memory``: bytes cached per sample at each site, from the compiled programs.

Errors of single samples are kept in ``benchmarks/.cache``, so an interrupted run goes on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching import cached_sample, fuca_sample, make_plan, taylorseer, uniform_schedule
from fadex.caching.compare import (
    ALL_METHODS,
    GRID_METHODS,
    build_method,
    conditioned_task,
    method_sites,
    relative_error,
)
from fadex.models import (
    DIGITS_SHAPE,
    digits_text_batch,
    load_digits_mmdit,
    save_digits_mmdit,
)
from fadex.sampling import ab2, dpmpp_2m, flow_euler, sample, uniform_times

HERE = Path(__file__).parent
STEPS = 50
GUIDANCES = (1.0, 3.0)
FIELD = tuple(
    dict.fromkeys([*ALL_METHODS, "bezicast_bare", "bezicast_state", "fuca_none", "fuca_x0",
                   "fuca_fade", "fuca_fade_x0"])
)
# For each number of evaluations the smallest interval that spends it, i.e. the most even one.
HEADLINE_INTERVALS = tuple(
    {uniform_schedule(STEPS, n).nfe: n for n in range(24, 1, -1)}.values()
)
TOLERANCES = (0.02, 0.05)


def mmdit_task(seed: int, args):
    """The digits MMDiT trained from ``seed`` with text conditions and noise of its own."""
    path = HERE / ".cache" / f"mmdit_{seed}_{args.train_steps}"
    if not path.exists():
        from train_mmdit import train_digits_mmdit

        params, losses = train_digits_mmdit(seed, args.train_steps)
        print(f"trained MMDiT seed {seed}: loss {float(losses[-100:].mean()):.3f}", flush=True)
        save_digits_mmdit(path, params)
    denoiser, params = load_digits_mmdit(path)
    return conditioned_task(
        denoiser, params, lambda count: digits_text_batch(count)[:2], shape=DIGITS_SHAPE,
        samples=args.samples, seed=7100 + seed, profile_samples=args.profile_samples,
    )


class Runner:
    """Errors of one task's methods, each computed once and kept on disk."""

    def __init__(self, name: str, task, args):
        self.name, self.task = name, task
        self.batch = (task.denoiser, task.params, task.x, task.cond)
        self.folder = HERE / ".cache" / "errors"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stamp = f"{args.train_steps}-{args.samples}-{args.profile_samples}"
        self.references: dict = {}

    def reference(self, guidance: float, sampler):
        """The full run."""
        key = (guidance, sampler)
        if key not in self.references:
            self.references[key] = sample(
                *self.batch, timesteps=uniform_times(STEPS), sampler=sampler, guidance=guidance,
                null_cond=self.task.null_cond,
            )
        return self.references[key]

    def __call__(self, method: str, interval: int, guidance: float, *, site="output",
                 sampler=None, label=""):
        """``(errors [B], evaluations, cost)``."""
        words = f"{self.name}/{self.stamp}/{method}/{interval}/{guidance}/{site}/{label}"
        path = self.folder / (hashlib.sha256(words.encode()).hexdigest()[:20] + ".npz")
        if path.exists():
            kept = np.load(path)
            return kept["errors"], int(kept["nfe"]), float(kept["cost"])
        sampler = flow_euler() if sampler is None else sampler
        schedule = uniform_schedule(STEPS, interval)
        if method in GRID_METHODS:
            grid = GRID_METHODS[method]()
            steps = max(schedule.nfe // grid.evals_per_step, 1)
            out = sample(
                *self.batch, timesteps=uniform_times(steps), sampler=grid, guidance=guidance,
                null_cond=self.task.null_cond,
            )
            nfe = cost = steps * grid.evals_per_step
        else:
            built = build_method(
                method, schedule, self.task, timesteps=uniform_times(STEPS), sampler=sampler,
                site=site, guidance=guidance,
            )
            out, nfe, cost = built.run(), built.nfe, built.cost
        errors = relative_error(out, self.reference(guidance, sampler))
        np.savez(path, errors=errors, nfe=nfe, cost=cost, words=words)
        return errors, nfe, cost


def bootstrap(per_seed: list[np.ndarray], count: int = 1000) -> np.ndarray:
    """Means of ``count`` resamples over training seeds and then samples."""
    rng = np.random.default_rng(0)
    sums = []
    for _ in range(count):
        seeds = rng.integers(0, len(per_seed), len(per_seed))
        sums.append(np.mean([
            rng.choice(per_seed[i], len(per_seed[i])).mean() for i in seeds
        ]))
    return np.array(sums)


# Guidance 1 is run for the methods whose ratios the README quotes, and their rivals.
AT_GUIDANCE_1 = ("taylor1", "ab2", "fade", "bezicast", "fuca", "fuca_fit", "fuca_placed")


def _rows(runners, methods, intervals, guidances, model):
    rows = []
    for guidance in guidances:
        for interval in intervals:
            base = None
            for method in methods if guidance > 1 else AT_GUIDANCE_1:
                sites = method_sites(method, ("output",), runners[0].task.denoiser)
                if not sites:
                    continue
                found = [run(method, interval, guidance, site=sites[0]) for run in runners]
                errors = [f[0] for f in found]
                mean = float(np.mean([e.mean() for e in errors]))
                low, high = np.quantile(bootstrap(errors), [0.025, 0.975])
                if method == "taylor1":
                    base = mean
                rows.append(dict(
                    model=model, guidance=guidance, interval=interval, method=method,
                    site=sites[0], nfe=float(np.mean([f[1] for f in found])),
                    cost=float(np.mean([f[2] for f in found])), rel_error=mean, low=float(low),
                    high=float(high),
                ))
                print(f"{model} guidance {guidance:g} N={interval} {method:>16} "
                      f"NFE {rows[-1]['nfe']:4.1f}  {mean:.4f} [{low:.4f}, {high:.4f}]",
                      flush=True)
            for row in rows:
                if row["guidance"] == guidance and row["interval"] == interval:
                    row["ratio"] = row["rel_error"] / base
    return rows


def part_field(tasks, args):
    runners = [Runner(f"dit{seed}", task, args) for seed, task in enumerate(tasks)]
    rows = _rows(runners, ("taylor1", *FIELD), (5, 8), GUIDANCES, "DiT")
    runners = [
        Runner(f"mmdit{seed}", mmdit_task(seed, args), args) for seed in range(args.train_seeds)
    ]
    methods = ("taylor1", "reuse", "taylor2", "dmd", "lsq", "fade", "fade_amplitude", "bezicast",
               "fuca", "fuca_x0", "fuca_fit", "teacache", "teacache_taylor", "magcache",
               "dbcache_taylor", "fade_placed", "fuca_placed", "ab2", "dpmpp_2m")
    return rows + _rows(runners, methods, (5, 8), GUIDANCES, "MMDiT")


def part_bars(tasks, args):
    """The issue's bars on BeziCast and FuCa: means over seeds, ratios to TaylorSeer-1."""
    from fadex.caching import GuardConfig, bezicast

    runners = [Runner(f"dit{seed}", task, args) for seed, task in enumerate(tasks)]
    mean = lambda method, n, g: float(np.mean([run(method, n, g)[0].mean() for run in runners]))

    def of_rule(label, rule, n, g):
        errors = []
        for run in runners:
            schedule, times = uniform_schedule(STEPS, n), uniform_times(STEPS)
            out = cached_sample(
                *run.batch, timesteps=times, plan=make_plan(schedule, rule), guidance=g,
                null_cond=run.task.null_cond,
            )
            errors.append(relative_error(out, run.reference(g, flow_euler())).mean())
        return float(np.mean(errors))

    unregularised = bezicast(degree=2, window=4, ridge=0.0, guard=None)
    regularised = bezicast(degree=2, window=4, ridge=1e-2, guard=None)
    guarded = bezicast(degree=2, window=4, ridge=0.0, guard=GuardConfig(2.5, 4.0))
    early = bezicast(degree=2, window=4, ridge=0.0, guard=GuardConfig(1.5, 2.0))
    rows = []
    for g in GUIDANCES:
        for n in (3, 4, 5, 6, 7, 8):
            base = mean("taylor1", n, g)
            bare = of_rule("bare", unregularised, n, g)
            row = dict(
                guidance=g, interval=n,
                **{f"{name}/taylor1": mean(name, n, g) / base for name in
                   ("bezicast", "bezicast_bare", "bezicast_state", "fuca", "fuca_x0", "fuca_none",
                    "fuca_fade", "fuca_fade_x0", "fuca_fit")},
                **{"ridge 1e-2 / ridge 0 (K=4)": of_rule("ridge", regularised, n, g) / bare,
                   "guard (2.5, 4) / none (K=4, ridge 0)": of_rule("g", guarded, n, g) / bare,
                   "guard (1.5, 2) / none (K=4, ridge 0)": of_rule("e", early, n, g) / bare},
            )
            rows.append(row)
            print("  ".join(f"{k} {v:.3g}" for k, v in row.items()), flush=True)
    return rows


def part_headline(tasks, args):
    """Largest ``S / NFE`` within a tolerance; intervals from long to short until it is met."""
    runners = [Runner(f"dit{seed}", task, args) for seed, task in enumerate(tasks)]
    plain = ("reuse", "taylor1", "taylor2", "ab2", "fuca_fit", "fuca_placed", "fade",
             "fade_amplitude", "bezicast", "fuca", "lsq", "dpmpp_2m", "teacache_taylor",
             "fade_placed", "ab2_placed", "taylor1_placed", "magcache", "dbcache_taylor",
             "hicache2", "dmd", "teacache", "toca")
    on_top = [("fade_amplitude", "ab2", ab2()), ("fade_amplitude", "dpmpp_2m", dpmpp_2m())]
    jobs = [(f"{name} on {label}", name, (label, sampler)) for name, label, sampler in on_top]
    jobs += [(name, name, None) for name in plain]
    rows = []
    for title, method, top in jobs:
        for guidance in GUIDANCES:
            rows.append(_largest(runners, title, method, top, guidance))
        (HERE / ".cache" / "headline.json").write_text(json.dumps(rows))
    return rows


def _largest(runners, title, method, top, guidance):
    label, sampler = ("", None) if top is None else top
    site = method_sites(method, ("output",))[0]
    speeds, means, draws = [], [], []
    for interval in HEADLINE_INTERVALS:
        found = [
            run(method, interval, guidance, site=site, sampler=sampler, label=label)
            for run in runners
        ]
        errors = [f[0] for f in found]
        # What skipped steps compute counts, and so does an adaptive policy's own spending.
        speeds.append(STEPS / float(np.mean([f[2] for f in found])))
        means.append(float(np.mean([e.mean() for e in errors])))
        draws.append(bootstrap(errors))
        # Enough when every resample (but one in a hundred) has met the tolerance somewhere.
        if np.mean(np.min(draws, axis=0) <= min(TOLERANCES)) >= 0.99:
            break
    order = np.argsort(speeds)[::-1]
    speeds, means, draws = (np.asarray(a)[order] for a in (speeds, means, draws))
    row = dict(method=title, guidance=guidance, samples=sum(len(e) for e in errors),
               speedups=speeds.tolist(), rel_errors=means.tolist())
    for tolerance in TOLERANCES:
        first = lambda ok: float(speeds[np.argmax(ok)]) if ok.any() else 1.0
        each = np.array([first(draws[:, i] <= tolerance) for i in range(draws.shape[1])])
        low, high = np.quantile(each, [0.025, 0.975])
        row[f"speedup_{tolerance}"] = [first(means <= tolerance), float(low), float(high)]
    print(f"guidance {guidance:g} {title:>28}: " + "; ".join(
        f"{row[f'speedup_{t}'][0]:.2f}x [{row[f'speedup_{t}'][1]:.2f}, "
        f"{row[f'speedup_{t}'][2]:.2f}] at {t}" for t in TOLERANCES), flush=True)
    return row


def part_memory(tasks, args):
    """Cached bytes per sample: temporaries of the cached program beyond those of the plain one."""
    del tasks
    from flax import nnx

    from fadex.models import DiT, DiTConfig, from_nnx, load_digits_dit

    schedule, times = uniform_schedule(STEPS, 5), uniform_times(STEPS)
    plan = make_plan(schedule, taylorseer(1))
    config = DiTConfig.named("S/2", in_channels=4, scan_layers=True)
    models = {
        "digits DiT": (*load_digits_dit(), DIGITS_SHAPE, lambda b: jnp.zeros(b, jnp.int32)),
        "digits MMDiT": (*load_digits_mmdit(), DIGITS_SHAPE, lambda b: digits_text_batch(b)[0]),
        "DiT-S/2": (*from_nnx(DiT(config, rngs=nnx.Rngs(0))), (32, 32, 4),
                    lambda b: jnp.zeros(b, jnp.int32)),
    }
    rows = []
    for name, (denoiser, params, shape, conditions) in models.items():

        def temporary(fn, batch, params=params, shape=shape, conditions=conditions):
            x = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
            compiled = jax.jit(fn).lower(params, x, conditions(batch)).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        def per_sample(fn):
            return (temporary(fn, 16) - temporary(fn, 8)) / 8

        run = functools.partial(sample, denoiser, timesteps=times)
        plain = per_sample(run)
        cached = functools.partial(cached_sample, denoiser, timesteps=times, plan=plan)
        programs = {
            (site, "plan, K = 2"): functools.partial(cached, site=site)
            for site in ("output", "crf", "module")
        }
        programs["output", "FuCa"] = functools.partial(
            fuca_sample, denoiser, timesteps=times, schedule=schedule
        )
        for (site, what), program in programs.items():
            cached = per_sample(program)
            rows.append(dict(
                model=name, site=site, method=what, plain_bytes=plain, cached_bytes=cached,
                extra_bytes=cached - plain, sample_bytes=4 * int(np.prod(shape)),
            ))
            print(f"{name:>13} {site:>7} {what:<12}: {cached - plain:12.0f} bytes a sample beyond "
                  f"the plain program's {plain:.0f} (x itself: {rows[-1]['sample_bytes']})",
                  flush=True)
    return rows


def part_compile(tasks, args):
    """Time to lower and compile each cached sampler over that of one model step."""
    del tasks
    from fadex.caching import adaptive_sample, dbcache, dmd, teacache, toca_sample
    from fadex.models import load_digits_dit

    denoiser, params = load_digits_dit()
    schedule, times = uniform_schedule(STEPS, 6), uniform_times(STEPS)
    plan = make_plan(schedule, taylorseer(1))
    x, cond = jnp.ones((8, *DIGITS_SHAPE)), jnp.arange(8)
    shared = dict(timesteps=times)
    cached = functools.partial(cached_sample, denoiser, plan=plan, **shared)
    programs = {
        "plan, output": cached,
        "plan, crf": functools.partial(cached, site="crf"),
        "plan, module": functools.partial(cached, site="module"),
        "DMD": functools.partial(cached, plan=dmd(schedule)),
        "FuCa": functools.partial(fuca_sample, denoiser, schedule=schedule, **shared),
        "FuCa, crf": functools.partial(
            fuca_sample, denoiser, schedule=schedule, site="crf", **shared
        ),
        "TeaCache": functools.partial(
            adaptive_sample, denoiser, policy=teacache(0.1), site="crf", **shared
        ),
        "first-block cache": functools.partial(
            adaptive_sample, denoiser, policy=dbcache(0.1), site="crf", **shared
        ),
        "ToCa": functools.partial(toca_sample, denoiser, schedule=schedule, **shared),
    }

    def seconds(fn):
        found = []
        for _ in range(args.pairs):
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(lambda p, x, c: fn(p, x, c)).lower(params, x, cond).compile()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    step = lambda p, x, c: denoiser.apply(p, x, jnp.ones(len(x)), c)
    rows = []
    for name, program in programs.items():
        ratio = seconds(program) / seconds(step)
        rows.append(dict(program=name, ratio=ratio))
        print(f"{name:>18}: {ratio:.2f} x the compile time of one model step (bar 4)", flush=True)
    return rows


PARTS = {
    "compile": part_compile,
    "field": part_field,
    "bars": part_bars,
    "headline": part_headline,
    "memory": part_memory,
}
