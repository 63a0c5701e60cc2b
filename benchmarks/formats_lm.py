"""Four-bit weights and activations in trained language models.

    python benchmarks/formats_lm.py               # train what is not cached, measure, print
    python benchmarks/formats_lm.py --train-only
    python benchmarks/formats_lm.py --table       # print what was measured

Character-level transformers (4 layers, width 64, 400 steps on the King James Bible), one for each
seed, made of ``fadex.models.layers``. Their matrices inside the layers (not the embedding and the
head) are quantized by recipe: weights alone (W4A16), or weights and the activations that meet them
(W4A4, dynamic scales). Measured on fixed windows of the validation books, per character:

* ``kl``: KL(p || q), p the float model's distribution of the next character and q the quantized
  one's. At this size the difference in loss is dominated by a first-order term of random sign, so
  the bars are on this;
* the perplexity ``P = exp(loss)``, and the share of NVFP4's perplexity loss that a format removes,
  ``1 - (P - P_float) / (P_nvfp4 - P_float)`` with means over the models, next to RaZeR's paper.

Trained models are kept in ``benchmarks/.cache`` under a hash of the settings; results go to
``benchmarks/results/formats_lm.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fadex.core.progress import progress_bar
from fadex.core.pytree import flatten_with_paths, map_with_path
from fadex.data import random_windows, spaced_windows, text_corpus
from fadex.models.layers import Embed, Linear
from fadex.quant import (
    Recipe,
    Site,
    dequantize,
    mxfp4,
    nvfp4,
    nvfp4_4o6,
    quantize,
    razer_e3m3,
    razer_e4m3,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "formats_lm.json"
CACHE = HERE / ".cache" / "formats_lm"
SEEDS = (0, 1, 2, 3, 4)
# Weights; the activations' format where both are quantized.
FORMATS = {
    "mxfp4": (mxfp4(), mxfp4()),
    "nvfp4": (nvfp4(), nvfp4()),
    "nvfp4_4o6": (nvfp4_4o6(), nvfp4_4o6()),
    "razer_e4m3": (razer_e4m3(), razer_e4m3()),
    "razer_e3m3": (razer_e3m3(), razer_e4m3()),
    "razer_e3m3_w7": (razer_e3m3(7), razer_e4m3()),
}
MODES = ("w4a16", "w4a4")
BASELINE = "nvfp4"
# Share of NVFP4's perplexity loss that RaZeR removes: its abstract, and the tables of version 2.
PAPER = {"w4a16": (0.294, 0.346), "w4a4": (0.323, 0.312)}
# Upper bounds on the KL ratio to NVFP4, mean over the models; and, in w4a16, the order.
BARS = {
    "w4a16": {"razer_e3m3": 0.80, "razer_e3m3_w7": 0.80, "razer_e4m3": 0.86},
    "w4a4": {"razer_e3m3": 0.80},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The model and its training; every field is part of the cache's key."""

    depth: int = 4
    width: int = 64
    num_heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 400
    learning_rate: float = 4e-3
    warmup: int = 40
    weight_decay: float = 0.01
    corpus: str = "kjv"
    eval_windows: int = 256
    init: str = "normal"


# Gaussian as in published language models, or uniform. It matters: 400 steps keep the shape of the
# distribution, and a uniform one has no tails to speak of, which flatters every finer grid.
INITS = {
    "normal": nnx.initializers.variance_scaling(1.0, "fan_in", "normal"),
    "uniform": nnx.initializers.xavier_uniform(),
}


class Block(nnx.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.width
        kwargs = dict(kernel_init=INITS[config.init], rngs=rngs)
        self.num_heads = config.num_heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = Linear(width, 3 * width, **kwargs)
        self.proj = Linear(width, width, **kwargs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.fc1 = Linear(width, 4 * width, **kwargs)
        self.fc2 = Linear(4 * width, width, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x))
        qkv = qkv.reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.reshape(batch, tokens, width))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x))))


class CharLM(nnx.Module):
    """``[B, T]`` character ids to logits ``[B, T, V]``; layers stacked, run under a scan."""

    def __init__(self, config: Config, vocabulary: int, *, rngs: nnx.Rngs):
        self.embed = Embed(vocabulary, config.width, rngs=rngs)
        self.positions = Embed(config.context, config.width, rngs=rngs)
        blocks = [Block(config, rngs=rngs) for _ in range(config.depth)]
        states = [nnx.state(block, nnx.Param) for block in blocks]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        self.layers = nnx.merge(nnx.split(blocks[0], nnx.Param, ...)[0], stacked, {})
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = Linear(config.width, vocabulary, kernel_init=INITS[config.init], rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]))
        graph, state = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, state)
        return self.head(self.norm(x))


class Setting:
    """What all models share: the text, the graph of the model, and pure functions on them."""

    def __init__(self, config: Config):
        text = text_corpus(config.corpus)
        self.config = config
        self.train_ids = jnp.asarray(text.train)
        self.windows = spaced_windows(text.valid, config.eval_windows, config.context + 1)
        model = nnx.eval_shape(lambda: CharLM(config, len(text.alphabet), rngs=nnx.Rngs(0)))
        self.vocabulary = len(text.alphabet)
        self.graph, self.like = nnx.split(model, nnx.Param)
        settings = json.dumps([dataclasses.asdict(config), text.sha256], sort_keys=True)
        self.key = hashlib.sha256(settings.encode()).hexdigest()[:16]

    def apply(self, params: Any, ids: jax.Array) -> jax.Array:
        return nnx.merge(self.graph, params)(ids)

    def loss(self, params: Any, windows: jax.Array) -> jax.Array:
        logits = self.apply(params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def training_step(setting: Setting):
    """``(params, state, key, ids) -> (params, state, loss)`` over 20 steps, and the optimizer."""
    c = setting.config
    rate = optax.warmup_cosine_decay_schedule(0.0, c.learning_rate, c.warmup, c.steps, 0.0)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=c.weight_decay)
    )

    @jax.jit
    def steps(params, state, keys, ids):
        def step(carry, key):
            params, state = carry
            windows = random_windows(key, ids, c.batch, c.context + 1)
            loss, grads = jax.value_and_grad(setting.loss)(params, windows)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, state), losses = jax.lax.scan(step, (params, state), keys)
        return params, state, losses.mean()

    return optimizer, steps


def trained(setting: Setting, seeds: tuple[int, ...]) -> dict[int, Any]:
    """Parameters by seed, trained where ``benchmarks/.cache`` does not hold them."""
    c = setting.config
    CACHE.mkdir(parents=True, exist_ok=True)
    files = {seed: CACHE / f"{setting.key}-{seed}.npz" for seed in seeds}
    missing = [seed for seed in seeds if not files[seed].exists()]
    if missing:
        optimizer, steps = training_step(setting)
        init = jax.jit(lambda key: nnx.state(
            CharLM(c, setting.vocabulary, rngs=nnx.Rngs(params=key)), nnx.Param))
        with progress_bar(len(missing) * c.steps // 20, "training") as advance:
            for seed in missing:
                key = jax.random.key(seed)
                params = init(jax.random.fold_in(key, 0))
                state = optimizer.init(params)
                keys = jax.random.split(jax.random.fold_in(key, 1), c.steps)
                for first in range(0, c.steps, 20):
                    params, state, loss = steps(
                        params, state, keys[first : first + 20], setting.train_ids
                    )
                    advance(1)
                print(f"seed {seed}: last training loss {float(loss):.4f}", flush=True)
                temporary = files[seed].with_suffix(".tmp.npz")
                np.savez(temporary, **{k: np.asarray(v) for k, v in
                                       flatten_with_paths(params).items()})
                os.replace(temporary, files[seed])
    found = {}
    for seed in seeds:
        with np.load(files[seed]) as stored:
            found[seed] = map_with_path(lambda path, _: jnp.asarray(stored[path]), setting.like)
    return found


def evaluator(setting: Setting):
    """``(quantized params, float params, windows) -> (kl, loss, float loss)``, means, jitted."""
    c = setting.config
    targets = lambda logits, windows: -jnp.take_along_axis(
        logits, windows[:, 1:, None], axis=-1
    ).mean()

    @jax.jit
    def evaluate(quantized, params, windows):
        def group(windows):
            p = jax.nn.log_softmax(setting.apply(params, windows[:, :-1]))
            q = jax.nn.log_softmax(setting.apply(quantized, windows[:, :-1]))
            kl = (jnp.exp(p) * (p - q)).sum(-1).mean()
            return kl, targets(q, windows), targets(p, windows)

        groups = windows.reshape(-1, c.batch, c.context + 1)
        return [value.mean() for value in jax.lax.map(group, groups)]

    return evaluate


def measure(setting: Setting, models: dict[int, Any], results: dict[str, Any]) -> None:
    """Fill in what ``results`` does not hold yet, by mode, format and seed."""
    evaluate = evaluator(setting)
    with progress_bar(len(MODES) * len(FORMATS) * len(models), "formats") as advance:
        for mode in MODES:
            for name, (weights, activations) in FORMATS.items():
                target = weights if mode == "w4a16" else Site(weights, activations)
                recipe = Recipe((("layers/**/kernel", target), ("**", None)))
                convert = lambda params, recipe=recipe, mode=mode: (
                    dequantize(quantize(params, recipe)) if mode == "w4a16"
                    else quantize(params, recipe)
                )
                convert = jax.jit(convert)
                rows = results["runs"].setdefault(mode, {}).setdefault(name, {})
                for seed, params in models.items():
                    if str(seed) not in rows:
                        kl, loss, exact = evaluate(convert(params), params, setting.windows)
                        rows[str(seed)] = {"kl": float(kl), "loss": float(loss)}
                        results["float_loss"][str(seed)] = float(exact)
                        write(results)
                    advance(1)
                print(f"{mode} {name}: {len(rows)} models", flush=True)


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """KL ratios over the first 3, the first 5 and all models, and cuts of the perplexity loss."""
    seeds = sorted(results["float_loss"], key=int)
    exact = np.exp([results["float_loss"][seed] for seed in seeds])
    out: dict[str, Any] = {"seeds": len(seeds), "float_perplexity": float(exact.mean())}
    for mode, formats in results["runs"].items():
        kl = {name: np.array([rows[s]["kl"] for s in seeds]) for name, rows in formats.items()}
        added = {
            name: np.exp([rows[s]["loss"] for s in seeds]) - exact
            for name, rows in formats.items()
        }
        base = added[BASELINE]
        for name in formats:
            ratio = kl[name] / kl[BASELINE]
            row = {
                "kl": float(kl[name].mean()),
                "kl_ratio_3": float(ratio[:3].mean()), "kl_ratio_5": float(ratio[:5].mean()),
                "kl_ratio": float(ratio.mean()),
                "kl_ratio_se": float(ratio.std(ddof=1) / np.sqrt(len(seeds))),
                "kl_ratio_worst": float(ratio.max()),
                "added_perplexity": float(added[name].mean()),
                "added_perplexity_se": float(added[name].std(ddof=1) / np.sqrt(len(seeds))),
                "cut_5": float(1 - added[name][:5].mean() / base[:5].mean()),
                "cut": float(1 - added[name].mean() / base.mean()),
            }
            if len(seeds) > 2 and name != BASELINE:  # the jackknife of a ratio of means
                left_out = np.array([
                    1 - np.delete(added[name], i).mean() / np.delete(base, i).mean()
                    for i in range(len(seeds))
                ])
                n = len(seeds)
                row["cut_se"] = float(np.sqrt((n - 1) * left_out.var()))
            out.setdefault(mode, {})[name] = row
    return out


def bars(summary: dict[str, Any]) -> list[tuple[str, float, float]]:
    """``(what, measured, upper bound)`` of every bar, over 3 and over 5 models."""
    found = []
    for mode, bounds in BARS.items():
        for count in (3, 5):
            of = {name: row[f"kl_ratio_{count}"] for name, row in summary[mode].items()}
            found += [(f"{mode} {name}, {count} models", of[name], bar)
                      for name, bar in bounds.items()]
            if mode == "w4a16":
                razer = max(of[name] for name in of if name.startswith("razer"))
                found.append((f"{mode} worst razer below 4/6, {count} models", razer,
                              of["nvfp4_4o6"]))
                found.append((f"{mode} 4/6 below nvfp4, {count} models", of["nvfp4_4o6"], 1.0))
                found.append((f"{mode} nvfp4 below mxfp4, {count} models", 1.0, of["mxfp4"]))
    return found


def results_path(init: str) -> Path:
    return RESULTS if init == "normal" else RESULTS.with_stem(f"formats_lm_{init}")


def write(results: dict[str, Any]) -> None:
    path = results_path(results["config"]["init"])
    path.parent.mkdir(parents=True, exist_ok=True)
    results["versions"] = {"jax": jax.__version__}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


def table(results: dict[str, Any]) -> str:
    summary = results["summary"]
    lines = [f"{summary['seeds']} models, float perplexity {summary['float_perplexity']:.3f} a "
             "character"]
    for mode in MODES:
        lines += ["", f"{mode:15} {'KL':>9} {'KL / nvfp4: 3':>13} {'5':>6} {'all':>6} {'se':>6} "
                  f"{'perplexity +':>12} {'se':>7} {'cut: 5':>7} {'all':>6} {'se':>6}"]
        for name, row in summary[mode].items():
            lines.append(
                f"{name:15} {row['kl']:9.6f} {row['kl_ratio_3']:13.3f} {row['kl_ratio_5']:6.3f} "
                f"{row['kl_ratio']:6.3f} {row['kl_ratio_se']:6.3f} "
                f"{row['added_perplexity']:12.5f} {row['added_perplexity_se']:7.5f} "
                f"{row['cut_5']:7.1%} {row['cut']:6.1%} {row.get('cut_se', 0.0):6.1%}"
            )
        abstract, tables = PAPER[mode]
        lines.append(f"RaZeR's paper: cut {abstract:.1%} (abstract), {tables:.1%} (its tables)")
    lines += ["", "bars"]
    lines += [f"{'met   ' if value <= bound else 'MISSED'} {what}: {value:.3f} <= {bound:.3f}"
              for what, value, bound in bars(summary)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--init", choices=tuple(INITS), default="normal")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--table", action="store_true", help="print what was measured")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(results_path(args.init).read_text())))
        return
    setting = Setting(Config(init=args.init))
    models = trained(setting, tuple(args.seeds))
    if args.train_only:
        return
    path = results_path(args.init)
    results = json.loads(path.read_text()) if path.exists() else {}
    if results.get("key") != setting.key:
        results = {"key": setting.key, "config": dataclasses.asdict(setting.config),
                   "float_loss": {}, "runs": {}}
    measure(setting, models, results)
    results["summary"] = summarize(results)
    write(results)
    print(table(results))


if __name__ == "__main__":
    main()
