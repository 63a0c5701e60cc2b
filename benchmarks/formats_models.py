"""Number formats on the weights of a real model, the sentence encoder MiniLM.

    python benchmarks/formats_models.py            # measure what is not there yet, print
    python benchmarks/formats_models.py --table    # print what was measured

For each format, quantized by recipe:

* the squared error over the squared values (nMSE) of each of the 36 matrices inside the layers,
  next to the means and ratios that the specification measured with another implementation;
* what 200 verses of the King James Bible (its validation books) become: the mean cosine distance
  of their vectors from the float model's, and how well the 19,900 pairwise similarities keep their
  values (Pearson) and order (Spearman), and verses their nearest neighbour;
* stored bytes of the matrices.

Weights alone, and weights with the activations that meet them (dynamic scales). Results go to
``benchmarks/results/formats_models.json``, one format at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from fadex.core.progress import progress_bar
from fadex.core.pytree import flatten_with_paths
from fadex.data import decode_text, text_corpus
from fadex.models import embed_sentences, load_minilm
from fadex.quant import (
    Format,
    QuantizedArray,
    Recipe,
    Site,
    dequantize,
    fp8,
    int_group,
    mxfp4,
    mxfp6,
    mxfp8,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize,
    razer_e3m3,
    razer_e4m3,
)

RESULTS = Path(__file__).parent / "results" / "formats_models.json"
VERSION = 1  # of the protocol: a change makes every result stale
VERSES = 200
BASELINE = "nvfp4"
MATRICES = "layers/**/kernel"

FORMATS: dict[str, Format] = {
    "nvfp4": nvfp4(),
    "nvfp4_4o6": nvfp4_4o6(),
    "razer_e4m3": razer_e4m3(),
    "razer_e3m3": razer_e3m3(),
    "razer_e3m3_w7": razer_e3m3(7),
    "nvfp4 with e3m3 scales": Format("nvfp4_e3m3", "e2m1", 16, "e3m3", two_level=True),
    "mxfp4": mxfp4(),
    "mxfp4, ceil": mxfp4(scale_rule="ceil"),
    "int4 g32": int_group(4, 32),
    "int4 g16": int_group(4, 16),
    "nf4 g64": nf4(64),
    "nf4 g16": nf4(16),
    "int2 g16": int_group(2, 16),
    "int3 g32": int_group(3, 32),
    "mxfp6": mxfp6(),
    "mxfp8": mxfp8(),
    "fp8": fp8(),
    "int8": int_group(8, None),
}
SITES: dict[str, Site] = {
    "nvfp4 / nvfp4": Site(nvfp4(), nvfp4()),
    "nvfp4_4o6 / nvfp4_4o6": Site(nvfp4_4o6(), nvfp4_4o6()),
    "razer_e4m3 / razer_e4m3": Site(razer_e4m3(), razer_e4m3()),
    "razer_e3m3 / razer_e4m3": Site(razer_e3m3(), razer_e4m3()),
    "razer_e3m3_w7 / razer_e4m3": Site(razer_e3m3(7), razer_e4m3()),
    "mxfp4 / mxfp4": Site(mxfp4(), mxfp4()),
    "mxfp8 / mxfp8": Site(mxfp8(), mxfp8()),
    "fp8 / fp8": Site(fp8(), fp8()),
    "int8 / int8": Site(int_group(8, None), int_group(8, None)),
}
# Mean nMSE x 1000 over the 36 matrices, from the specification's own prototype.
SPEC = {
    "mxfp4": 13.76, "mxfp4, ceil": 14.28, "int4 g32": 10.30, "int4 g16": 7.72, "nf4 g64": 8.80,
    "nf4 g16": 6.51, "nvfp4": 8.914, "nvfp4 with e3m3 scales": 8.915, "nvfp4_4o6": 7.522,
    "razer_e4m3": 6.257, "razer_e3m3": 5.631, "razer_e3m3_w7": 5.415,
}  # fmt: skip
# Upper bounds on the error ratio to NVFP4 of every single matrix.
BARS = {"razer_e4m3": 0.74, "razer_e3m3": 0.66, "razer_e3m3_w7": 0.66}


def verses() -> tuple[list[str], str]:
    """Verses at even distances in the validation books, and a digest of them."""
    text = text_corpus("kjv")
    lines = [line for line in decode_text(text.valid, text.alphabet).splitlines() if line.strip()]
    chosen = [lines[i * (len(lines) - 1) // (VERSES - 1)] for i in range(VERSES)]
    return chosen, hashlib.sha256("\n".join(chosen).encode()).hexdigest()


def matrix_errors(params: Any, values: Any) -> dict[str, float]:
    """nMSE of each matrix by path, in float64; the layers are stacked on the leading axis."""
    after = flatten_with_paths(values)
    found = {}
    for path, before in flatten_with_paths(params).items():
        if not (path.startswith("layers/") and path.endswith("kernel")):
            continue
        x, y = (np.asarray(a, np.float64) for a in (before, after[path]))
        for i, value in enumerate(np.square(y - x).sum((1, 2)) / np.square(x).sum((1, 2))):
            found[path.replace("layers/", f"layers/{i}/", 1)] = float(value)
    return found


def fidelity(vectors: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """How far sentence vectors (of length 1) and their similarities moved."""
    pairs = np.triu_indices(len(exact), 1)
    before, after = exact @ exact.T, vectors @ vectors.T
    nearest = lambda similar: (similar - 2 * np.eye(len(similar))).argmax(1)
    return {
        "cosine_distance": float((1 - (vectors * exact).sum(1, dtype=np.float64)).mean()),
        "cosine_distance_max": float((1 - (vectors * exact).sum(1, dtype=np.float64)).max()),
        "pearson": float(stats.pearsonr(before[pairs], after[pairs]).statistic),
        "spearman": float(stats.spearmanr(before[pairs], after[pairs]).statistic),
        "nearest_kept": float((nearest(before) == nearest(after)).mean()),
    }


def stored(tree: Any) -> tuple[int, int]:
    """Bytes and values of the quantized arrays of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, QuantizedArray))
    held = [leaf for leaf in leaves if isinstance(leaf, QuantizedArray)]
    return sum(q.nbytes for q in held), sum(q.size for q in held)


def run(*, again: bool = False) -> dict[str, Any]:
    """Measure what the file does not hold yet; return its contents."""
    sentences, digest = verses()
    encoder, params, tokenizer = load_minilm(scan_layers=True, multiple=128)
    embed = lambda params: embed_sentences(encoder, params, tokenizer, sentences, batch_size=40)
    weights = hashlib.sha256(b"".join(
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)
    )).hexdigest()
    key = hashlib.sha256(json.dumps([VERSION, digest, weights]).encode()).hexdigest()[:16]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if again or results.get("key") != key:
        results = {"key": key, "verses": VERSES, "verses_sha256": digest,
                   "weights_sha256": weights, "weights": {}, "sites": {}}
    exact = embed(params)
    with progress_bar(len(FORMATS) + len(SITES), "formats") as advance:
        for part, table in (("weights", FORMATS), ("sites", SITES)):
            for name, target in table.items():
                if name not in results[part]:
                    recipe = Recipe(((MATRICES, target), ("**", None)))
                    packed = jax.jit(lambda p, recipe=recipe: quantize(p, recipe))(params)
                    used, values = stored(packed)
                    row = {"bytes": used, "bits_per_weight": 8 * used / values}
                    if part == "weights":
                        # The float program on the decoded weights: a test shows that the packed
                        # ones give the same.
                        packed = jax.jit(dequantize)(packed)
                        row["nmse"] = matrix_errors(params, packed)
                    row |= fidelity(embed(packed), exact)
                    results[part][name] = row
                    write(results)
                    print(f"{part} {name}: {row['cosine_distance']:.3e}", flush=True)
                advance(1)
    return results


def write(results: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    results["versions"] = {"jax": jax.__version__}
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, RESULTS)


def ratios(results: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Mean nMSE, its ratio to NVFP4's mean, and the largest ratio of any matrix."""
    mine, base = results["weights"][name]["nmse"], results["weights"][BASELINE]["nmse"]
    values, reference = (np.array([x[path] for path in base]) for x in (mine, base))
    return values.mean(), values.mean() / reference.mean(), (values / reference).max()


def bars(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """``(what, measured, upper bound)`` of every bar."""
    found = [(f"{name}: largest error ratio of a matrix", ratios(results, name)[2], bar)
             for name, bar in BARS.items()]
    found += [(f"{name}: mean nMSE away from the specification's",
               abs(1e3 * ratios(results, name)[0] / value - 1), 0.02)
              for name, value in SPEC.items()]
    for part, names in (
        ("weights", ("razer_e3m3", "nvfp4_4o6", "nvfp4")),
        ("sites", ("razer_e3m3 / razer_e4m3", "nvfp4_4o6 / nvfp4_4o6", "nvfp4 / nvfp4")),
    ):
        for low, high in itertools.pairwise(names):
            distance = [results[part][name]["cosine_distance"] for name in (low, high)]
            found.append((f"cosine distance: {low} below {high}", *distance))
    found.append(("bytes: razer_e3m3 as nvfp4", results["weights"]["razer_e3m3"]["bytes"],
                  results["weights"]["nvfp4"]["bytes"]))
    return found


def table(results: dict[str, Any]) -> str:
    measures = f"{'distance':>9} {'Pearson':>8} {'Spearman':>8} {'nearest':>8}"
    lines = [f"{'weights':27} {'bits':>6} {'kB':>6} {'nMSE e-3':>9} {'/nvfp4':>7} {'max':>6} "
             f"{'spec e-3':>8}  {measures}"]
    fidelities = lambda row: (f"{row['cosine_distance']:9.2e} {row['pearson']:8.5f} "
                              f"{row['spearman']:8.5f} {row['nearest_kept']:8.1%}")
    for name, row in results["weights"].items():
        mean, ratio, worst = ratios(results, name)
        lines.append(
            f"{name:27} {row['bits_per_weight']:6.3f} {row['bytes'] / 1e3:6.0f} {1e3 * mean:9.4f} "
            f"{ratio:7.4f} {worst:6.3f} {SPEC.get(name, ''):>8}  {fidelities(row)}"
        )
    lines += ["", f"{'weights / activations':27} {'bits':>6} {'kB':>6} {'':34} {measures}"]
    for name, row in results["sites"].items():
        lines.append(f"{name:27} {row['bits_per_weight']:6.3f} {row['bytes'] / 1e3:6.0f} {'':34} "
                     f"{fidelities(row)}")
    lines += ["", "bars"]
    lines += [f"{'met   ' if value <= bound else 'MISSED'} {what}: {value:.4g} <= {bound:.4g}"
              for what, value, bound in bars(results)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--table", action="store_true", help="print what was measured")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if args.table else run(again=args.again)
    print(table(results))


if __name__ == "__main__":
    main()
