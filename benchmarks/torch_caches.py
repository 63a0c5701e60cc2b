"""Step caches of diffusers and cache-dit against ours: one trained model, equal evaluations.

The shipped digits MMDiT is exported to a ``FluxTransformer2DModel``, so both frameworks hold the
same trained weights; their velocities and full runs are compared first. Every method then samples
a flow by Euler steps from the same noise and is measured against the full run of its own
framework:

* ``evaluations``: steps in which the second double block was really computed, counted by a hook
  (ours: of the plan, or of the policy's statistics);
* ``cost``: matrix-product FLOPs of the run over those of one full evaluation. Methods that keep a
  block, the MLPs or the head running in skipped steps cost more than their evaluations say;
* ``speedup``: of the framework's own full run, median over interleaved rounds. On one CPU the
  process's own CPU time is taken, which other load on the machine leaves alone. The model is so
  small that overhead decides; no ratios are taken between frameworks.

Thresholds are bisected on a profiling batch to spend 9, 13 and 19 evaluations, on both sides; on
the test batch a policy may then spend one more or less. What else a peer lets one choose (warm-up,
longest skip, phase of the interval, order) is swept on the profiling batch, and the setting of
least error is reported. Our schedules keep three warm-up steps, and nothing of ours is swept.
Rows marked ``documented`` are a peer's defaults or examples.

State is reset before every generation as each library asks: ``_reset_stateful_cache`` of
diffusers' models (a pipeline does it), ``refresh_context`` of cache-dit.

Run: ``python benchmarks/torch_caches.py`` with the ``bench-diffusers`` extra and cache-dit 1.5.3;
``--quick`` tries every method at one budget in a few minutes and writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PEERS = "pip install 'fadex-jax[bench-diffusers]' cache-dit==1.5.3"
RESULTS = Path(__file__).parent / "results" / "torch_caches.json"
STEPS = 50
INTERVALS = {9: 8, 13: 5, 19: 3}  # evaluations -> interval of our uniform schedule, warm-up 3
OURS = [
    ("taylor1", "output"), ("taylor1", "crf"), ("taylor1", "module"), ("foca", "crf"),
    ("dmd", "crf"), ("teacache", "crf"), ("teacache_taylor", "crf"), ("magcache", "crf"),
    ("dbcache", "crf"), ("dbcache_taylor", "crf"), ("fade_amplitude", "output"),
    ("bezicast", "output"), ("fuca", "output"), ("fuca_fit", "output"), ("fuca_placed", "output"),
    ("euler", "output"), ("ab2", "output"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=16, help="of both batches")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each kind")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs that either side may use")
    parser.add_argument("--quick", action="store_true", help="one budget, coarse thresholds")
    parser.add_argument("--out", type=Path, help=f"{RESULTS} by default, nothing with --quick")
    args = parser.parse_args()
    modules = {"torch": "torch", "diffusers": "diffusers", "cache_dit": "cache-dit"}
    absent = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if absent:
        print(f"{', '.join(absent)} not installed; this benchmark needs: {PEERS}", file=sys.stderr)
        return 2
    # Before jax and torch start their threads: both get the same CPUs.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cpus])
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")
    import torch

    torch.set_num_threads(args.cpus)
    if args.quick:
        args.samples, args.repeats = 4, 1
    args.rounds = 6 if args.quick else 9
    out = args.out or (None if args.quick else RESULTS)
    report = run(args)
    print_table(report)
    if out is not None:
        write_json(out, report)
        print(f"\nwrote {out}")
    return 0


def run(args: argparse.Namespace) -> dict:
    import cache_dit
    import diffusers
    import jax
    import torch

    from fadex.caching.compare import conditioned_task
    from fadex.models import DIGITS_SHAPE, digits_text_batch, load_digits_mmdit

    denoiser, params = load_digits_mmdit()
    task = conditioned_task(
        denoiser, params, lambda count: digits_text_batch(count)[:2], shape=DIGITS_SHAPE,
        samples=args.samples, seed=0, profile_samples=args.samples,
    )
    targets = [13] if args.quick else list(INTERVALS)
    torch_side = TorchSide(task)
    ours = Ours(task)
    agreement = torch_side.agreement(denoiser, ours.full())
    if max(agreement.values()) > 1e-5:
        raise AssertionError(f"the two frameworks do not hold the same model: {agreement}")
    tuner = Tuner(torch_side, args.rounds, args.quick)
    rows, calls, failed = [], [], []
    for peer in peers(torch_side):
        wanted = [(None, s) for s in peer.fixed] + [(t, None) for t in targets if peer.grid]
        for target, settings in wanted:
            progress(f"{peer.library} {peer.name} {target or 'documented'}")
            try:
                found = settings if target is None else tuner.best(peer, target)
                if found is None:
                    failed.append(dict(library=peer.library, method=peer.name, reason=(
                        f"no setting swept spends {target} evaluations or fewer")))
                    continue
                row, call = torch_side.measure(peer, found)
            except Exception as error:  # a peer's own failure is a result
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                failed.append(dict(library=peer.library, method=peer.name, reason=reason))
                continue
            rows.append({**row, "target": target})
            calls.append(call)
    speedups_theirs = speedups(torch_side.full, calls, args)
    calls = []
    for target in targets:
        for name, site in OURS:
            progress(f"fadex {name} {site} {target}")
            row, call = ours.measure(name, site, target)
            rows.append(row)
            calls.append(call)
    for row, speedup in zip(rows, speedups_theirs + speedups(ours.full, calls, args)):
        row["speedup"] = speedup
    rows.sort(key=lambda row: (row["evaluations"], row["relative_error"]))
    return {
        "model": "digits MMDiT as FluxTransformer2DModel: 2 double, 2 single blocks, width 64",
        "num_steps": STEPS,
        "samples": args.samples,
        "targets": targets,
        "repeats": args.repeats,
        "cpus": args.cpus,
        "versions": {"jax": jax.__version__, "torch": torch.__version__,
                     "diffusers": diffusers.__version__, "cache-dit": cache_dit.__version__},
        **agreement,
        "rows": rows,
        "not_run": failed + not_run(torch_side),
        "notes": notes(torch_side),
    }


class Prepared(NamedTuple):
    """A model with a cache on it."""

    model: Any
    reset: Callable[[], Any]  # before every generation
    contexts: bool  # diffusers' hooks read their context at every step


class Peer(NamedTuple):
    """A method of another library.

    ``make(**settings)`` prepares a model. ``fixed``: documented settings to measure as they are;
    ``grid(target)``: settings to sweep for a budget. ``threshold``: the range in which the setting
    of that name is bisected, None for a method that has none.
    """

    library: str
    name: str
    make: Callable[..., Prepared]
    fixed: tuple[dict, ...] = ()
    grid: Callable[[int], list[dict]] | None = None
    threshold: tuple[float, float] | None = None


class Batch(NamedTuple):
    x: Any  # tokens [B, N, C]
    txt: Any
    pooled: Any


class TorchSide:
    """The exported model, its batches and its full runs."""

    def __init__(self, task):
        import numpy as np
        import torch
        from flax import nnx

        from fadex.models import (
            DIGITS_MMDIT_CONFIG,
            DIGITS_SHAPE,
            digits_mmdit,
            export_state_dict,
        )
        from fadex.sampling import uniform_times

        self.task = task
        self.config = DIGITS_MMDIT_CONFIG
        ours = digits_mmdit()
        nnx.update(ours, task.params)
        exported = export_state_dict(ours, layout="flux_diffusers")
        self.weights = {name: torch.from_numpy(np.array(a)) for name, a in exported.items()}
        self.grid = (DIGITS_SHAPE[0] // 2, DIGITS_SHAPE[1] // 2)
        row, column = np.divmod(np.arange(self.grid[0] * self.grid[1]), self.grid[1])
        self.img_ids = torch.from_numpy(np.stack([0 * row, row, column], 1).astype(np.float32))
        self.txt_ids = torch.zeros(task.cond["txt"].shape[1], 3)
        self.times = [float(t) for t in np.asarray(uniform_times(STEPS))]
        tensor = lambda a: torch.from_numpy(np.array(a))
        batch = lambda x, cond: Batch(
            tensor(self.pack(x)), tensor(cond["txt"]), tensor(cond["pooled"])
        )
        self.test = batch(task.x, task.cond)
        self.profile = batch(task.profile_x, task.profile_cond)
        self.plain = Prepared(self.build(), lambda: None, False)
        self.timestep = 0.0  # of the step that runs, in [0, 1000]; some hooks ask for it
        self.reference = {id(b): self.sample(self.plain, b) for b in (self.test, self.profile)}
        self.flops = self.count_flops(self.plain) / STEPS

    def build(self):
        from diffusers import FluxTransformer2DModel

        c = self.config
        model = FluxTransformer2DModel(
            patch_size=1, in_channels=c.in_channels, num_layers=c.double_depth,
            num_single_layers=c.single_depth, attention_head_dim=c.head_width,
            num_attention_heads=c.num_heads, joint_attention_dim=c.text_width,
            pooled_projection_dim=c.pooled_width, guidance_embeds=c.guidance_embed,
            axes_dims_rope=c.rope_axes,
        ).eval()
        model.load_state_dict(self.weights)
        return model

    def pack(self, x):
        """``[B, height, width, channels]`` to tokens in FLUX's order (channel, row, column)."""
        import numpy as np

        x, (rows, columns) = np.asarray(x), self.grid
        x = x.reshape(len(x), rows, 2, columns, 2, -1).transpose(0, 1, 3, 5, 2, 4)
        return x.reshape(len(x), rows * columns, -1)

    def velocity(self, model, x, t: float, batch: Batch):
        import torch

        return model(
            hidden_states=x, encoder_hidden_states=batch.txt, pooled_projections=batch.pooled,
            timestep=torch.full((len(x),), t), img_ids=self.img_ids, txt_ids=self.txt_ids,
            return_dict=False,
        )[0]

    def sample(self, prepared: Prepared, batch: Batch, *, reset: bool = True):
        import torch

        if reset:
            prepared.reset()
        model, x = prepared.model, batch.x
        with torch.inference_mode():
            for step in range(STEPS):
                t, t_next = self.times[step : step + 2]
                self.timestep = 1000.0 * t
                context = model.cache_context(
                    "cond", step_index=step, sigma=t, num_inference_steps=STEPS
                ) if prepared.contexts else contextlib.nullcontext()
                with context:
                    velocity = self.velocity(model, x, t, batch)
                x = x + (t_next - t) * velocity
        return x.numpy()

    def full(self):
        return self.sample(self.plain, self.test)

    def agreement(self, denoiser, full_ours) -> dict[str, float]:
        """How far the frameworks differ: one velocity, and the full run."""
        import jax.numpy as jnp
        import torch

        task = self.task
        ours = self.pack(denoiser.apply(task.params, task.x, jnp.float32(0.7), task.cond))
        with torch.inference_mode():
            theirs = self.velocity(self.plain.model, self.test.x, 0.7, self.test).numpy()
        return {
            "velocity_relative_difference": relative_error(ours, theirs),
            "full_relative_difference": relative_error(
                self.pack(full_ours), self.reference[id(self.test)]
            ),
        }

    @contextlib.contextmanager
    def computed_steps(self, model):
        """The steps in which the second double block computes, in a list that fills."""
        step, steps = [-1], []
        handles = [
            model.x_embedder.register_forward_pre_hook(
                lambda *_: step.__setitem__(0, step[0] + 1)
            ),
            # Inside the attention: a cache that replaces block or attention does not reach it.
            model.transformer_blocks[1].attn.to_q.register_forward_pre_hook(
                lambda *_: steps.append(step[0])
            ),
        ]
        try:
            yield steps
        finally:
            for handle in handles:
                handle.remove()

    def counted(self, prepared: Prepared, batch: Batch, **options):
        """The samples and the computed steps."""
        with self.computed_steps(prepared.model) as steps:
            return self.sample(prepared, batch, **options), steps

    def count_flops(self, prepared: Prepared) -> int:
        import torch
        from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        count = lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)
        with FlopCounterMode(display=False, custom_mapping={attention: count}) as counter:
            self.sample(prepared, self.test)
        return counter.get_total_flops()

    def error(self, out, batch: Batch) -> float:
        return relative_error(out, self.reference[id(batch)])

    def measure(self, peer: Peer, settings: dict) -> tuple[dict, Callable]:
        prepared = peer.make(**settings)
        self.sample(prepared, self.profile)  # whatever a generation leaves behind is there
        out, steps = self.counted(prepared, self.test)
        row = {
            "library": peer.library, "method": peer.name, "settings": describe(settings),
            "evaluations": len(steps), "cost": self.count_flops(prepared) / self.flops,
            "relative_error": self.error(out, self.test), "computed_steps": steps,
        }
        return row, lambda: self.sample(prepared, self.test)


class Tuner:
    """Settings of a peer for a budget, chosen on the profiling batch."""

    def __init__(self, side: TorchSide, rounds: int, quick: bool):
        self.side, self.rounds, self.quick = side, rounds, quick

    def best(self, peer: Peer, target: int) -> dict | None:
        """Of the swept settings within the budget, that of least error."""
        swept, grid = [], peer.grid(target)
        for settings in grid[:1] if self.quick else grid:
            if peer.threshold is not None:
                threshold = self.calibrate(peer, settings, target)
                if threshold is None:
                    continue
                settings = {**settings, "threshold": threshold}
            out, steps = self.side.counted(peer.make(**settings), self.side.profile)
            if len(steps) <= target:
                swept.append((self.side.error(out, self.side.profile), len(swept), settings))
        return min(swept)[2] if swept else None

    def calibrate(self, peer: Peer, settings: dict, budget: int) -> float | None:
        """A threshold amid those that spend the budget; like ``methods.calibrate`` for ours."""
        low, high = (math.log(bound) for bound in peer.threshold)
        known: dict[float, int] = {}

        def spent(power: float) -> int:
            if power not in known:
                prepared = peer.make(**settings, threshold=math.exp(power))
                known[power] = len(self.side.counted(prepared, self.side.profile)[1])
            return known[power]

        def first_within(limit: int) -> float:
            below, above = low, high
            for _ in range(self.rounds):
                middle = 0.5 * (below + above)
                below, above = (below, middle) if spent(middle) <= limit else (middle, above)
            return above

        if spent(high) > budget:
            return None
        enough = first_within(budget)
        one_less = first_within(budget - 1) if spent(high) < budget else high
        middle = 0.5 * (enough + min(one_less, enough + 2.0))
        return math.exp(middle if spent(middle) <= budget else enough)


def peers(side: TorchSide) -> list[Peer]:
    return [*diffusers_peers(side), *cache_dit_peers(side)]


def diffusers_peers(side: TorchSide) -> list[Peer]:
    import torch
    from diffusers import (
        FasterCacheConfig,
        FirstBlockCacheConfig,
        MagCacheConfig,
        PyramidAttentionBroadcastConfig,
        TaylorSeerCacheConfig,
    )
    from diffusers.hooks import SeaCacheConfig

    def hooked(config) -> Prepared:
        model = side.build()
        model.enable_cache(config)
        return Prepared(model, model._reset_stateful_cache, True)

    def calibrated_ratios() -> list[float]:
        """By the procedure of the documentation: calibrate, and copy what is printed."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            config = MagCacheConfig(calibrate=True, num_inference_steps=STEPS)
            side.sample(hooked(config), side.profile)
        return ast.literal_eval(printed.getvalue().strip().splitlines()[-1])

    ratios = calibrated_ratios()

    def magcache(threshold=0.06, retention_ratio=0.2, max_skip_steps=3) -> Prepared:
        return hooked(MagCacheConfig(
            threshold=threshold, retention_ratio=retention_ratio, max_skip_steps=max_skip_steps,
            num_inference_steps=STEPS, mag_ratios=ratios,
        ))

    def magcache_grid(target):
        # The documented fifth of the steps at the start leaves nothing of the smaller budgets.
        return [dict(retention_ratio=keep, max_skip_steps=skip)
                for keep in (0.06, 0.2) if keep * STEPS < target for skip in (STEPS, 8, 3)]

    where = {
        "attention": {},  # the default patterns
        "modules": dict(
            cache_identifiers=[r"transformer_blocks\.\d+\.(attn|ff|ff_context)",
                               r"single_transformer_blocks\.\d+\.proj_out"],
            skip_predict_identifiers=[r"single_transformer_blocks\.\d+\.(attn|proj_mlp)"],
        ),
        "lite": dict(use_lite_mode=True),
    }

    def taylorseer(place):
        def make(cache_interval, disable_cache_before_step, max_order=1) -> Prepared:
            return hooked(TaylorSeerCacheConfig(
                cache_interval=cache_interval, max_order=max_order,
                disable_cache_before_step=disable_cache_before_step,
                taylor_factors_dtype=torch.float32, **where[place],
            ))
        return make

    def taylorseer_grid(target):
        # The rule of its steps, read from its source.
        spent = lambda n, before: sum(s < before or (s - before - 1) % n == 0
                                      for s in range(STEPS))
        return [dict(cache_interval=n, disable_cache_before_step=before, max_order=order)
                for before in (3, 1, 2, 4, 6, 8, 10) for n in range(2, 16) for order in (1, 2)
                if spent(n, before) == target]

    def latents(module, args, kwargs):
        """The tokens of every sample as ``[C, frames, rows, columns]``."""
        tokens = kwargs["hidden_states"]
        return list(tokens.reshape(len(tokens), *side.grid, -1).permute(0, 3, 1, 2)[:, :, None])

    def seacache(threshold, residual_order=1, max_consecutive_cached=0) -> Prepared:
        return hooked(SeaCacheConfig(
            threshold=threshold, residual_order=residual_order,
            max_consecutive_cached=max_consecutive_cached, raw_vision_callback=latents,
        ))

    def pab(skip_range) -> Prepared:
        return hooked(PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=skip_range,
            spatial_attention_timestep_skip_range=(100, 800),
            current_timestep_callback=lambda: side.timestep,
        ))

    def fastercache(skip_range) -> Prepared:
        return hooked(FasterCacheConfig(
            spatial_attention_block_skip_range=skip_range, is_guidance_distilled=True,
            attention_weight_callback=lambda _: 0.3,
            current_timestep_callback=lambda: side.timestep,
        ))

    def first_block(threshold) -> Prepared:
        return hooked(FirstBlockCacheConfig(threshold=threshold))

    logging_off()
    return [
        Peer("diffusers", "FirstBlockCache", first_block, (dict(threshold=0.05),),
             lambda target: [{}], (1e-2, 2.0)),
        Peer("diffusers", "MagCache", magcache, ({},), magcache_grid, (1e-2, 20.0)),
        Peer("diffusers", "SeaCache", seacache,
             (dict(threshold=0.25, max_consecutive_cached=2),),
             lambda target: [dict(residual_order=1), dict(residual_order=0)], (1e-2, 2.0)),
        *(Peer("diffusers", f"TaylorSeer {place}", taylorseer(place), (), taylorseer_grid)
          for place in where),
        Peer("diffusers", "PAB", pab, (dict(skip_range=2), dict(skip_range=4))),
        Peer("diffusers", "FasterCache", fastercache, (dict(skip_range=2),)),
    ]


def cache_dit_calibrators() -> dict[str, Callable[[], Any]]:
    from cache_dit import DMDCalibratorConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig

    return {
        "DBCache": lambda: None,
        "DBCache+TaylorSeer": lambda: TaylorSeerCalibratorConfig(taylorseer_order=1),
        "DBCache+FoCa": FoCaCalibratorConfig,
        "DBCache+DMD": DMDCalibratorConfig,
    }


def cache_dit_model(side: TorchSide, calibrator: Callable[[], Any], **options) -> Prepared:
    """F1B0 on all four blocks as one list, which is what ``enable_cache`` does to FLUX."""
    import cache_dit
    from cache_dit import DBCacheConfig

    config = lambda: DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, num_inference_steps=STEPS, **options
    )
    model = side.build()
    cache_dit.enable_cache(model, cache_config=config(), calibrator_config=calibrator())

    def reset():
        arguments = {} if calibrator() is None else {"calibrator_config": calibrator()}
        cache_dit.refresh_context(model, cache_config=config(), **arguments)

    return Prepared(model, reset, False)


def cache_dit_peers(side: TorchSide) -> list[Peer]:
    import cache_dit

    from fadex.caching import uniform_schedule

    def dynamic(calibrator):
        def make(threshold=0.08, max_warmup_steps=8, max_continuous_cached_steps=-1) -> Prepared:
            return cache_dit_model(
                side, calibrator, residual_diff_threshold=threshold,
                max_warmup_steps=max_warmup_steps,
                max_continuous_cached_steps=max_continuous_cached_steps,
            )
        return make

    def dynamic_grid(target):
        # 8 and 6 are those of the documentation.
        return [dict(max_warmup_steps=warmup, max_continuous_cached_steps=longest)
                for warmup in (3, 8) if warmup < target - 2 for longest in (-1, 6)]

    def masked(calibrator):
        def make(mask) -> Prepared:
            if isinstance(mask, int):
                steps = uniform_schedule(STEPS, INTERVALS[mask], warmup=3)
                steps = [int(steps.is_anchor(s)) for s in range(STEPS)]
            else:
                steps = cache_dit.steps_mask(mask_policy=mask, total_steps=STEPS)
            return cache_dit_model(
                side, calibrator, steps_computation_mask=steps, steps_computation_policy="static"
            )
        return make

    found = []
    for name, calibrator in cache_dit_calibrators().items():
        found.append(Peer("cache-dit", name, dynamic(calibrator), ({},), dynamic_grid,
                          (1e-2, 0.999)))  # from 1 on everything counts as similar
        policies = (dict(mask="ultra"), dict(mask="fast")) if "+" in name else ()
        # The mask of our uniform schedule: one setting, nothing to sweep.
        found.append(Peer("cache-dit", f"{name} mask", masked(calibrator), policies,
                          lambda target: [dict(mask=target)]))
    return found


def not_run(side: TorchSide) -> list[dict]:
    """What is left out, and why."""
    import diffusers.hooks
    import torch
    from diffusers import FasterCacheConfig

    found = []
    if not any(name.startswith("TeaCache") for name in dir(diffusers.hooks)):
        found.append(dict(library="diffusers", method="TeaCache", reason="not in this version"))
    found.append(dict(
        library="diffusers", method="TextKVCache",
        reason="keeps keys and values of the text for models built for it; skips no step",
    ))
    found.append(dict(
        library="cache-dit", method="DBPrune",
        reason="prunes single blocks and skips no step: no number of evaluations to compare at",
    ))
    model = side.build()
    model.enable_cache(FasterCacheConfig(
        tensor_format="BCHW", attention_weight_callback=lambda _: 0.3,
        current_timestep_callback=lambda: side.timestep,
    ))
    half = Batch(*(torch.cat([a, a]) for a in side.test))
    try:
        side.sample(Prepared(model, model._reset_stateful_cache, True), half)
    except Exception as error:
        found.append(dict(
            library="diffusers", method="FasterCache of the unconditional branch",
            reason="halves the batch of FLUX's inputs except pooled_projections: "
                   f"{type(error).__name__}: {str(error)[:120]}",
        ))
    return found


def notes(side: TorchSide) -> list[str]:
    """Behaviour of the peers that a user should know, measured here."""
    import torch
    from cache_dit import DMDCalibratorConfig
    from diffusers import TaylorSeerCacheConfig

    found = []
    threshold = 0.2
    prepared = cache_dit_model(
        side, lambda: None, residual_diff_threshold=threshold, max_warmup_steps=3
    )
    runs = [side.counted(prepared, side.test, reset=False) for _ in range(3)]
    steps = [s[:6] for _, s in runs]
    found.append(
        "cache-dit, transformer only: num_inference_steps refreshes the context one step late (the "
        "check reads the counter before it is raised), so the first step of the next generation "
        "belongs to the old context and the shift grows by one each time. Three generations from "
        f"the same noise without refresh_context begin with the computed steps {steps}, "
        f"{[len(s) for _, s in runs]} in all, with errors "
        f"{[round(side.error(out, side.test), 4) for out, _ in runs]}. refresh_context before "
        "every generation avoids it and is used for all rows."
    )
    model = side.build()
    model.enable_cache(TaylorSeerCacheConfig(taylor_factors_dtype=torch.float32))
    prepared = Prepared(model, model._reset_stateful_cache, True)
    runs = [side.counted(prepared, side.test, reset=i == 0) for i in range(2)]
    found.append(
        "diffusers TaylorSeer counts steps across generations: without _reset_stateful_cache (a "
        "private method that pipelines call) a second generation computes "
        f"{len(runs[1][1])} steps in place of {len(runs[0][1])}, none at the start, with error "
        f"{side.error(runs[1][0], side.test):.4f} in place of "
        f"{side.error(runs[0][0], side.test):.4f}. PAB's counter goes on in the same way."
    )
    spaced = forecasts_of_the_step((0, 5, 10))
    found.append(
        f"cache-dit's calibrators forecast f(11) of the feature f(s) = s, computed at the steps 0, "
        f"5, 10, as {spaced}. FoCa does not divide its differences by the spacing of the computed "
        "steps. DMD's fallback to a Taylor series, used without four equally spaced steps, takes "
        "the difference to the step before the last one over the last spacing alone; behind a long "
        "gap that is many times the slope (the rows of DMD with a predefined mask)."
    )
    found.append(
        "cache-dit creates a calibrator's state behind the count of its first step, so the state "
        "lags by one, and a guard on its second step withholds the first slope: computed at the "
        f"steps 0, 1, 2 it forecasts f(3) as {forecasts_of_the_step((0, 1, 2))}. Behind three "
        "warm-up steps TaylorSeer therefore reuses until a fourth step is computed. Here that "
        "helps: the slope of neighbouring steps is a poor one over a long gap."
    )
    prepared = cache_dit_model(
        side, DMDCalibratorConfig, residual_diff_threshold=threshold, max_warmup_steps=3
    )
    _, computed = side.counted(prepared, side.test)
    gaps = [b - a for a, b in itertools.pairwise(computed)]
    found.append(
        "cache-dit DMD fits four or more equally spaced computed steps only; a dynamic threshold "
        f"gives it the spacings {gaps} here, so that it mostly falls back. With the mask of a "
        "uniform schedule it fits exponentials."
    )
    found.append(
        "diffusers TaylorSeer's default patterns reach the attention alone: the MLPs and the head "
        "run at every step, which the column cost shows. bfloat16 factors are its default; "
        "float32 here."
    )
    return found


def forecasts_of_the_step(computed: tuple[int, ...]) -> dict[str, float]:
    """What cache-dit's calibrators make of ``f(s) = s`` one step behind the last computed one."""
    import torch
    from cache_dit.caching.cache_contexts.calibrators import (
        DMDCalibrator,
        FoCaCalibrator,
        TaylorSeerCalibrator,
    )

    forecasts = {}
    for calibrator in (TaylorSeerCalibrator(), FoCaCalibrator(), DMDCalibrator()):
        for step in range(max(computed) + 2):
            calibrator.mark_step_begin()
            if step in computed:
                calibrator.update(torch.full((1, 1), float(step)), name="feature")
        forecasts[type(calibrator).__name__] = float(calibrator.approximate(name="feature"))
    return forecasts


class Ours:
    """Our methods on the same task."""

    def __init__(self, task):
        from fadex.sampling import uniform_times

        self.task, self.times = task, uniform_times(STEPS)
        self.reference = self.full()

    def full(self):
        import jax

        from fadex.sampling import sample

        task = self.task
        return jax.block_until_ready(
            sample(task.denoiser, task.params, task.x, task.cond, timesteps=self.times)
        )

    def measure(self, name: str, site: str, target: int) -> tuple[dict, Callable]:
        import jax

        from fadex.caching import uniform_schedule
        from fadex.caching.compare import GRID_METHODS, build_method
        from fadex.sampling import flow_euler, sample, uniform_times

        task = self.task
        if name in GRID_METHODS:
            grid = dict(timesteps=uniform_times(target), sampler=GRID_METHODS[name]())
            call = lambda: sample(task.denoiser, task.params, task.x, task.cond, **grid)
            spent = cost = target
            name = f"{name} on a coarse grid"
        else:
            schedule = uniform_schedule(STEPS, INTERVALS[target], warmup=3)
            built = build_method(
                name, schedule, task, timesteps=self.times, sampler=flow_euler(), site=site
            )
            call, spent, cost = built.run, built.nfe, built.cost
        row = {
            "library": "fadex", "method": name, "settings": site, "evaluations": int(spent),
            "cost": float(cost), "relative_error": relative_error(call(), self.reference),
            "target": target,
        }
        return row, lambda: jax.block_until_ready(call())


def relative_error(actual, expected) -> float:
    """Mean over the batch of ``||actual - expected|| / ||expected||``."""
    from fadex.caching.compare import relative_error

    return float(relative_error(actual, expected).mean())


def speedups(full: Callable, calls: list[Callable], args: argparse.Namespace) -> list[float]:
    """Of every call, the median over rounds of the full run's time over its own.

    The full run is timed again before every few calls; the first round warms up.
    """
    clock = time.process_time if args.cpus == 1 else time.perf_counter

    def seconds(call):
        start = clock()
        call()
        return clock() - start

    ratios: list[list[float]] = [[] for _ in calls]
    for round_ in range(args.repeats + 1):
        for i, call in enumerate(calls):
            if i % 4 == 0:
                base = seconds(full)
            taken = seconds(call)
            if round_:
                ratios[i].append(base / taken)
        progress(f"timed {round_}/{args.repeats}")
    return [statistics.median(found) for found in ratios]


def describe(settings: dict) -> str:
    """``name=value`` of all settings, the long names shortened."""
    short = {"cache_interval": "interval", "disable_cache_before_step": "before",
             "max_order": "order", "residual_order": "order", "retention_ratio": "retention",
             "max_skip_steps": "max_skip", "max_warmup_steps": "warmup",
             "max_continuous_cached_steps": "max_skip", "max_consecutive_cached": "max_skip"}
    form = lambda v: f"{v:.3g}" if isinstance(v, float) else str(v)
    return " ".join(f"{short.get(k, k)}={form(v)}" for k, v in settings.items()) or "defaults"


def logging_off() -> None:
    from diffusers.utils import logging

    logging.set_verbosity_error()


def progress(text: str) -> None:
    print(f"\r  {text:60}", end="", file=sys.stderr, flush=True)


def print_table(report: dict) -> None:
    print(f"\n{report['model']}; {report['samples']} samples, {report['num_steps']} Euler steps")
    print(f"full runs differ by {report['full_relative_difference']:.1e} (relative)\n")
    print(f"{'evals':>5} {'cost':>5}  {'error':>8}  {'full/run':>8}  {'library':9} "
          f"{'method':28} settings")
    for row in report["rows"]:
        documented = " (documented)" if row["target"] is None else ""
        print(f"{row['evaluations']:5d} {row['cost']:5.1f}  {row['relative_error']:8.5f}  "
              f"{row['speedup']:8.2f}  {row['library']:9} {row['method']:28} "
              f"{row['settings']}{documented}")
    for row in report["not_run"]:
        print(f"not run: {row['library']} {row['method']}: {row['reason']}")
    for note in report["notes"]:
        print(f"note: {note}")


def write_json(path: Path, report: dict) -> None:
    """The report, every row on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in report["rows"])
    text = json.dumps({**report, "rows": "ROWS"}, indent=1)
    work = path.with_name(path.name + ".writing")
    work.write_text(text.replace('"ROWS"', f"[\n{rows}\n ]") + "\n")
    work.rename(path)


if __name__ == "__main__":
    raise SystemExit(main())
