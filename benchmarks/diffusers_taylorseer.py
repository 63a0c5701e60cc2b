"""TaylorSeer caching: ours against the hook of diffusers, on the same weights.

A ``DiTTransformer2DModel`` gets random weights, adaLN included, and is converted by
``fadex.models.convert``. Both sample a flow by Euler steps from the same noise, in full and
with a Taylor series of order 1 and 2 in the outputs of every attention and MLP. The cached
run differs from the full one; that relative error has to be the same on both sides.

Times are of interleaved runs on the same CPUs. ``digits`` is so small that they compare the
cost of dispatch (one compiled program against some hundred torch calls a step); ``medium``
spends its time in matrix products. diffusers evaluates the time and label embedders once in
every block, cached step or not; that is part of its time.

What the hook needs, found in its source (diffusers 0.42.1) and checked here at run time:

* its default patterns match no module of a DiT and nothing is said about it:
  ``cache_identifiers`` has to name ``attn1`` and ``ff``;
* a ``DiTTransformer2DModel`` has no ``enable_cache`` and no ``cache_context``: the hook is
  applied and the context set by hand;
* factors are stored in bfloat16 unless told otherwise;
* it computes the steps ``s < before``, ``s >= after`` and those where ``s - before - 1`` is a
  multiple of the interval: 0, 1, 2, 4, 9, 14, ... for the defaults, so the first series
  bridges one step only.

Run: ``python benchmarks/diffusers_taylorseer.py`` with the ``bench-diffusers`` extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

PEER_EXTRA = "pip install 'fadex-jax[bench-diffusers]'"
RESULTS = Path(__file__).parent / "results" / "diffusers_taylorseer.json"
MODULES = r"transformer_blocks\.\d+\.(attn1|ff)"
CLASSES = 10


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    size: int
    batch: int


SIZES = {"digits": Size(6, 64, 4, 8, 16), "medium": Size(6, 256, 4, 32, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each kind")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs that either side may use")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    absent = [name for name in ("torch", "diffusers") if importlib.util.find_spec(name) is None]
    if absent:
        print(f"{' and '.join(absent)} not installed; this benchmark needs: {PEER_EXTRA}",
              file=sys.stderr)
        return 2
    # Before jax and torch start their threads: both get the same CPUs.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cpus])
    import diffusers
    import jax
    import torch

    torch.set_num_threads(args.cpus)
    report = {
        "num_steps": args.steps,
        "interval": args.interval,
        "repeats": args.repeats,
        "cpus": args.cpus,
        "versions": {"jax": jax.__version__, "torch": torch.__version__,
                     "diffusers": diffusers.__version__},
        "models": {name: run(name, SIZES[name], args) for name in args.models},
    }
    write_json(args.out, report)
    print(f"\nwrote {args.out}")
    rows = [row for found in report["models"].values() for row in found["orders"]]
    if max(row["relative_difference"] for row in rows) > 1e-3:
        print("the two caches do not make the same error", file=sys.stderr)
        return 1
    return 0


def run(name: str, size: Size, args: argparse.Namespace) -> dict:
    import numpy as np

    rng = np.random.default_rng(0)
    noise = rng.standard_normal((size.batch, 1, size.size, size.size)).astype(np.float32)
    labels = (np.arange(size.batch) % CLASSES).astype(np.int32)
    peer = Peer(size, noise, labels, args)
    ours = Ours(peer.model.state_dict(), size, noise, labels, args)

    full_peer, full_ours = peer.full(), ours.full()
    report = {
        **size._asdict(),
        "modules_hooked_by_default_patterns": peer.hooked_by_default(),
        "full_relative_difference": relative_error(full_ours, full_peer),
        "orders": [],
    }
    for order in (1, 2):
        anchors = expected_anchors(args.steps, args.interval)
        cached_peer, computed = peer.cached(order)
        if computed != anchors:
            raise AssertionError(f"diffusers computed the steps {computed}, expected {anchors}")
        cached_ours, calls = ours.cached(order, computed)
        if calls != len(computed):
            raise AssertionError(f"our model was called {calls} times, expected {len(computed)}")
        error_peer = relative_error(cached_peer, full_peer)
        error_ours = relative_error(cached_ours, full_ours)
        kinds = {
            "ours_full": ours.full,
            "theirs_full": peer.full,
            "ours_cached": lambda order=order: ours.cached_timed(order),
            "theirs_cached": lambda order=order: peer.cached_timed(order),
        }
        seconds = interleaved(kinds, args.repeats)
        report["orders"].append({
            "order": order,
            "computed_steps": computed,
            "calls_ours": calls,
            "calls_theirs": len(computed),
            "relative_error_ours": error_ours,
            "relative_error_theirs": error_peer,
            "difference": abs(error_ours - error_peer),
            "relative_difference": abs(error_ours - error_peer) / error_peer,
            "cached_samples_relative_difference": relative_error(cached_ours, cached_peer),
            "seconds_median": {k: statistics.median(v) for k, v in seconds.items()},
            "time_ratio_full": ratio(seconds, "ours_full", "theirs_full"),
            "time_ratio_cached": ratio(seconds, "ours_cached", "theirs_cached"),
            "speedup_by_caching_ours": ratio(seconds, "ours_full", "ours_cached"),
            "speedup_by_caching_theirs": ratio(seconds, "theirs_full", "theirs_cached"),
        })
    print_table(name, report, args)
    return report


def expected_anchors(steps: int, interval: int, before: int = 3) -> list[int]:
    """The steps that the hook computes, read from its source; the last one is asked for."""
    return [s for s in range(steps)
            if s < before or (s - before - 1) % interval == 0 or s >= steps - 1]


def relative_error(actual, expected) -> float:
    """Mean over the batch of ``||actual - expected|| / ||expected||``."""
    import numpy as np

    flat = lambda x: np.asarray(x, np.float64).reshape(len(x), -1)
    error = np.linalg.norm(flat(actual) - flat(expected), axis=1)
    return float(np.mean(error / np.linalg.norm(flat(expected), axis=1)))


def interleaved(kinds: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of every kind, one run of each per round; the first round warms up."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(repeats + 1):
        for kind, call in kinds.items():
            start = time.perf_counter()
            call()
            if round_:
                seconds[kind].append(time.perf_counter() - start)
        print(f"\r  timed {round_}/{repeats}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def ratio(seconds: dict[str, list[float]], a: str, b: str) -> float:
    """Median over the rounds of ``a / b``, each taken within one round."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))


class Peer:
    """The torch model under diffusers' scheduler and hook."""

    def __init__(self, size, noise, labels, args):
        import torch

        self.size = size
        self.steps, self.interval = args.steps, args.interval
        self.noise, self.labels = torch.from_numpy(noise), torch.from_numpy(labels).long()
        self.model = self.build()
        self.hooked = {order: self.build_hooked(order) for order in (1, 2)}

    def build(self):
        import torch
        from diffusers import DiTTransformer2DModel

        model = DiTTransformer2DModel(
            num_attention_heads=self.size.heads, in_channels=1, patch_size=2,
            attention_head_dim=self.size.width // self.size.heads,
            num_layers=self.size.layers, sample_size=self.size.size, num_embeds_ada_norm=CLASSES,
        ).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                fan_in = value[0].numel() if value.ndim > 1 else self.size.width
                scale = 1.0 if "embedding_table" in name else fan_in**-0.5
                value.copy_(scale * torch.randn(value.shape, generator=generator))
        first, *others = model.transformer_blocks
        for block in others:
            block.norm1.emb.load_state_dict(first.norm1.emb.state_dict())
        return model

    def build_hooked(self, order: int):
        import torch
        from diffusers import TaylorSeerCacheConfig
        from diffusers.hooks import apply_taylorseer_cache

        model = self.build()
        apply_taylorseer_cache(model, TaylorSeerCacheConfig(
            cache_interval=self.interval, disable_cache_before_step=3,
            disable_cache_after_step=self.steps - 1, max_order=order,
            taylor_factors_dtype=torch.float32, cache_identifiers=[MODULES],
        ))
        if len(hooked_modules(model)) != 2 * self.size.layers:
            raise AssertionError(
                f"expected {2 * self.size.layers} hooks, found {hooked_modules(model)}"
            )
        return model

    def hooked_by_default(self) -> int:
        from diffusers import TaylorSeerCacheConfig
        from diffusers.hooks import apply_taylorseer_cache

        model = self.build()
        apply_taylorseer_cache(model, TaylorSeerCacheConfig())
        return len(hooked_modules(model))

    def sample(self, model, before_step=lambda step: None):
        import numpy as np
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / self.steps, self.steps))
        x = self.noise
        with torch.inference_mode():
            for step, timestep in enumerate(scheduler.timesteps):
                before_step(step)
                times = timestep.expand(len(x))
                velocity = model(x, timestep=times, class_labels=self.labels).sample
                x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        return x.numpy()

    def full(self):
        return self.sample(self.model)

    def cached_timed(self, order: int):
        from diffusers.hooks import HookRegistry
        from diffusers.hooks.hooks import CacheContext, _set_cache_context

        model = self.hooked[order]
        HookRegistry.check_if_exists_or_initialize(model).reset_stateful_hooks(recurse=True)
        _set_cache_context(model, CacheContext("cond"))
        return self.sample(model)

    def cached(self, order: int):
        """The samples, and the steps in which the modules really ran (the same for all)."""
        model = self.hooked[order]
        step = [-1]
        ran: dict[str, list[int]] = {}
        handles = []
        root = model.pos_embed.register_forward_pre_hook(
            lambda *_: step.__setitem__(0, step[0] + 1)
        )
        for i, block in enumerate(model.transformer_blocks):
            for name, inner in ((f"{i}/attn", block.attn1.to_q), (f"{i}/mlp", block.ff.net[2])):
                ran[name] = []
                handles.append(inner.register_forward_pre_hook(
                    lambda *_, name=name: ran[name].append(step[0])
                ))
        out = self.cached_timed(order)
        for handle in (root, *handles):
            handle.remove()
        computed = ran["0/attn"]
        if any(steps != computed for steps in ran.values()):
            raise AssertionError(f"the modules ran at different steps: {ran}")
        return out, computed


def hooked_modules(model) -> list[str]:
    """Names of the modules that carry a TaylorSeer hook."""
    return [
        name for name, module in model.named_modules()
        if "taylorseer_cache" in getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    ]


class Ours:
    """The converted model under our sampler and plan."""

    def __init__(self, weights, size, noise, labels, args):
        import jax.numpy as jnp

        from fadex.models import from_nnx
        from fadex.models.convert import load_dit
        from fadex.sampling import uniform_times

        model = load_dit(
            weights, num_heads=size.heads, layout="diffusers_dit", time_scale=1000.0
        )
        self.denoiser, self.params = from_nnx(model)
        self.noise = jnp.asarray(noise.transpose(0, 2, 3, 1))
        self.labels = jnp.asarray(labels)
        self.times = uniform_times(args.steps)
        self.plans: dict = {}

    def full(self):
        from fadex.sampling import sample

        out = sample(self.denoiser, self.params, self.noise, self.labels, timesteps=self.times)
        return self.torch_order(out)

    def cached_timed(self, order: int, denoiser=None):
        from fadex.caching import cached_sample

        out = cached_sample(
            denoiser or self.denoiser, self.params, self.noise, self.labels,
            timesteps=self.times, plan=self.plans[order], site="module",
        )
        return self.torch_order(out)

    def cached(self, order: int, anchors: list[int]):
        """The samples, and how often the whole model ran."""
        import jax

        from fadex.caching import custom_schedule, make_plan, taylorseer

        schedule = custom_schedule(len(self.times) - 1, anchors)
        self.plans[order] = make_plan(schedule, taylorseer(order))
        calls = []

        def counted(params, *inputs):
            jax.debug.callback(lambda: calls.append(1))
            return self.denoiser.with_features(params, *inputs)

        self.cached_timed(order, self.denoiser._replace(with_features=counted))
        jax.effects_barrier()
        return self.cached_timed(order), len(calls)

    @staticmethod
    def torch_order(x):
        import numpy as np

        return np.asarray(x).transpose(0, 3, 1, 2)


def print_table(name: str, report: dict, args: argparse.Namespace) -> None:
    print(f"\n{name}: {report['layers']} layers, width {report['width']}, "
          f"{report['size']}x{report['size']}, batch {report['batch']}, {args.steps} Euler steps, "
          f"interval {args.interval}; default patterns hook "
          f"{report['modules_hooked_by_default_patterns']} modules")
    print(f"full runs differ by {report['full_relative_difference']:.1e} (relative)")
    print("order  computed    error of the cached run           time ours/theirs   full/cached")
    print("       steps       ours      theirs    difference    full     cached    ours   theirs")
    for row in report["orders"]:
        print(f"{row['order']:5d}  {row['calls_ours']:2d} of {args.steps:2d}"
              f"    {row['relative_error_ours']:.6f}  {row['relative_error_theirs']:.6f}"
              f"  {row['difference']:.1e}"
              f"    {row['time_ratio_full']:6.3f}  {row['time_ratio_cached']:6.3f}"
              f"     {row['speedup_by_caching_ours']:5.2f}"
              f"  {row['speedup_by_caching_theirs']:5.2f}")


def write_json(path: Path, report: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(path.name + ".writing")
    work.write_text(json.dumps(report, indent=2) + "\n")
    work.rename(path)


if __name__ == "__main__":
    raise SystemExit(main())
