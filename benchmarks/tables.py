"""Print the README's figures from the results of the benchmarks.

    python benchmarks/tables.py            # print
    python benchmarks/tables.py --write    # and put them between the README's markers

A test compares the README with what this prints, so no figure there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a test loads this file by its path

import tables_optim  # noqa: E402
import tables_quant  # noqa: E402

README = HERE.parent / "README.md"
START, END = "<!-- figures: benchmarks/tables.py -->", "<!-- end of figures -->"

# (name, import name, source, status, key in the results)
METHODS = [
    ("FuCa, profiled, on placed anchors", "fadex.caching.place_fuca",
     "abstract; a reconstruction, extended", "done", "fuca_placed"),
    ("FuCa, profiled jumps", "fadex.caching.profile_fuca",
     "abstract; a reconstruction, extended", "done", "fuca_fit"),
    ("FuCa", "fadex.caching.fuca_sample", "abstract; a reconstruction", "done", "fuca"),
    ("FuCa, clean data held fixed", 'fadex.caching.fuca_sample(revise="x0")',
     "abstract; a reconstruction", "done", "fuca_x0"),
    ("FuCa on FADE", "fadex.caching.fuca_sample(predictor=plan)", "abstracts; reconstructions",
     "done", "fuca_fade"),
    ("FADE, amplitude, on placed anchors", "fadex.caching.profile_fade, profile_schedule",
     "abstract; a reconstruction, extended", "done", "fade_placed"),
    ("FADE", "fadex.caching.profile_fade", "abstract; a reconstruction", "done", "fade"),
    ("FADE, amplitude", "fadex.caching.profile_fade(amplitude=True)",
     "abstract; a reconstruction", "done", "fade_amplitude"),
    ("BeziCast", "fadex.caching.bezicast_plan", "abstract; a reconstruction", "done", "bezicast"),
    ("BeziCast, no guard", "fadex.caching.bezicast_plan(guard=None)",
     "abstract; a reconstruction", "done", "bezicast_bare"),
    ("BeziCast, guard on features", 'fadex.caching.bezicast_plan(guard="state")',
     "abstract; a reconstruction", "done", "bezicast_state"),
    ("TaylorSeer, order 1", "fadex.caching.taylorseer(1)", "arXiv 2503.06923", "done", "taylor1"),
    ("TaylorSeer-1 on placed anchors", "fadex.caching.taylorseer(1), profile_schedule",
     "arXiv 2503.06923, extended", "done", "taylor1_placed"),
    ("TaylorSeer, order 2", "fadex.caching.taylorseer(2)", "arXiv 2503.06923", "done", "taylor2"),
    ("HiCache", "fadex.caching.hicache", "arXiv 2508.16984", "done", "hicache2"),
    ("FoCa", "fadex.caching.foca", "arXiv 2508.16211", "done", "foca"),
    ("Newton", "fadex.caching.newton(2)", "textbook", "done", "newton2"),
    ("DMD", "fadex.caching.dmd", "Prony; after cache-dit", "done", "dmd"),
    ("Least squares, K = 3", "fadex.caching.profile_least_squares", "after arXiv 2604.26365",
     "done", "lsq"),
    ("TeaCache", "fadex.caching.teacache", "arXiv 2411.19108", "done", "teacache"),
    ("TeaCache, forecasting", "fadex.caching.adaptive_sample(order=1)",
     "arXiv 2411.19108, extended", "done", "teacache_taylor"),
    ("First-block cache, forecasting", "fadex.caching.dbcache", "after cache-dit", "done",
     "dbcache_taylor"),
    ("MagCache", "fadex.caching.magcache", "arXiv 2506.09045", "done", "magcache"),
    ("ToCa", "fadex.caching.toca_sample", "arXiv 2410.05317", "done", "toca"),
    ("Reuse", "fadex.caching.reuse", "FORA arXiv 2407.01425", "done", "reuse"),
    ("AB2 on a coarse grid", "fadex.sampling.ab2", "textbook", "done", "ab2"),
    ("AB2 on a placed grid", "fadex.sampling.ab2", "textbook", "done", "ab2_placed"),
    ("DPM-Solver++(2M) on a coarse grid", "fadex.sampling.dpmpp_2m", "arXiv 2211.01095", "done",
     "dpmpp_2m"),
    ("Euler on a coarse grid", "fadex.sampling.flow_euler", "textbook", "done", "euler"),
    ("Heun on a coarse grid", "fadex.sampling.flow_heun", "textbook", "done", "heun"),
    ("DDIM", "fadex.sampling.ddim", "arXiv 2010.02502", "done", None),
    ("DiT", "fadex.models.DiT", "arXiv 2212.09748", "done", None),
    ("MMDiT, FLUX", "fadex.models.MMDiT", "arXiv 2403.03206; FLUX.1", "done", None),
    ("Mittag-Leffler function", "fadex.core.special.mittag_leffler", "Laplace inversion",
     "done", None),
]
NAMES = {key: name for name, _, _, _, key in METHODS if key}
OURS = ("fade", "bezicast", "fuca", "fuca_fit", "fuca_placed")
CACHES = [key for key in NAMES if key not in ("ab2", "ab2_placed", "dpmpp_2m", "euler", "heun")]


def _headline(results) -> list[str]:
    rows = {(r["method"], r["guidance"]): r for r in results["headline"]}
    settings = results["settings"]["headline"]
    order = {m: i for i, m in enumerate(dict.fromkeys(r["method"] for r in results["headline"]))}
    columns = [(t, g) for t in (0.02, 0.05) for g in (1.0, 3.0)]
    value = lambda m, t, g: rows[m, g][f"speedup_{t}"]
    methods = sorted(
        order, key=lambda m: (-sum(value(m, t, g)[0] for t, g in columns), order[m])
    )
    title = lambda m: NAMES.get(m) or " on ".join(
        {"fade_amplitude": "FADE, amplitude", "ab2": "top of AB2",
         "dpmpp_2m": "top of DPM-Solver++(2M)"}.get(part, part) for part in m.split(" on ")
    )
    lines = [
        "## How far each method goes",
        "",
        "Largest speed-up S/NFE of a 50-step run at which the mean relative error to the full run "
        "stays within 0.02 and within 0.05, on the digits DiT: "
        f"{settings['train_seeds']} trained models, "
        f"{settings['train_seeds'] * settings['samples']} fresh samples in all, 95 % bootstrap "
        "intervals, one setting for each number of evaluations from 5 to 26. What skipped steps "
        "compute is counted (`python benchmarks/caching.py --only headline`):",
        "",
        "| method | " + " | ".join(f"{t}, guidance {g:g}" for t, g in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for m in methods:
        cells = ["{:.1f}x [{:.1f}, {:.1f}]".format(*value(m, t, g)) for t, g in columns]
        lines.append(f"| {title(m)} | " + " | ".join(cells) + " |")
    caches = [m for m in methods if m in CACHES]
    remarks = []
    for t, g in columns:
        best = max(caches, key=lambda m: value(m, t, g)[0])
        ahead = [
            m for m in methods if m not in caches and value(m, t, g)[0] > value(best, t, g)[0]
        ]
        if ahead:
            remarks.append(
                f"at {t} and guidance {g:g} " + ", ".join(title(m) for m in ahead)
            )
    lines.append("")
    if remarks:
        lines.append("Ahead of every cache of the plain Euler run: " + "; ".join(remarks) + ".")
    else:
        lines.append("No coarse grid is ahead of the best cache in any column.")
    return lines


def _methods(results) -> list[str]:
    rows = {(r["model"], r["guidance"], r["interval"], r["method"]): r for r in results["field"]}
    intervals = sorted({n for model, _, n, _ in rows if model == "DiT"})
    settings = results["settings"]["field"]
    nfe = {n: round(rows["DiT", 3.0, n, "taylor1"]["nfe"]) for n in intervals}
    places = [(model, n) for model in ("DiT", "MMDiT") for n in intervals]
    lines = [
        "",
        "## Methods and measured figures",
        "",
        "Relative error to the full 50-step run at guidance 3 and equal model evaluations, mean "
        f"over {settings['train_seeds']} trained models with {settings['samples']} fresh samples "
        "each: the digits DiT, and in the last columns the digits MMDiT with three text tokens. An "
        "adaptive policy's threshold is calibrated to the budget on other samples; what it really "
        "spent stands in brackets where it differs "
        "(`python benchmarks/caching.py --only field`):",
        "",
        "| method | import | source | status | "
        + " | ".join(f"{model}, {nfe[n]} of 50" for model, n in places) + " |",
        "|---" * (4 + len(places)) + "|",
    ]
    for name, path, source, status, key in METHODS:
        cells = []
        for model, n in places:
            row = rows.get((model, 3.0, n, key))
            if row is None:
                cells.append("")
                continue
            spent = "" if abs(row["nfe"] - nfe[n]) < 0.5 else f" ({row['nfe']:.0f})"
            cells.append(f"{row['rel_error']:.4f}{spent}")
        lines.append(f"| {name} | `{path}` | {source} | {status} | " + " | ".join(cells) + " |")
    lines += ["", "Error over TaylorSeer-1's at equal evaluations, and in brackets over that of "
              "AB2 on a coarse grid:", "",
              "| method | guidance | " + " | ".join(f"N = {n}" for n in intervals) + " |",
              "|---" * (2 + len(intervals)) + "|"]
    for key in OURS:
        for guidance in (1.0, 3.0):
            cells = []
            for n in intervals:
                error, taylor, grid = (
                    rows["DiT", guidance, n, m]["rel_error"] for m in (key, "taylor1", "ab2")
                )
                cells.append(f"{error / taylor:.2f} ({error / grid:.2f})")
            lines.append(f"| {NAMES[key]} | {guidance:g} | " + " | ".join(cells) + " |")
    return lines


def _costs(results) -> list[str]:
    lines = [
        "",
        "## Memory, compile time, wall time",
        "",
        "Bytes cached per sample beyond the plain sampler's program, in multiples of the sample's "
        "own size (`--only memory`, from the compiled programs):",
        "",
        "| model | output | FuCa, output | crf | module |",
        "|---|---|---|---|---|",
    ]
    memory = {(r["model"], r["site"], r["method"]): r for r in results["memory"]}
    plan = "plan, K = 2"
    for model in dict.fromkeys(r["model"] for r in results["memory"]):
        cells = []
        for site, what in (("output", plan), ("output", "FuCa"), ("crf", plan), ("module", plan)):
            row = memory[model, site, what]
            cells.append(f"{row['extra_bytes'] / row['sample_bytes']:.0f}")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    slowest = max(results["compile"], key=lambda r: r["ratio"])
    lines += [
        "",
        "Compile time of a cached sampler over that of one model step: at most "
        f"{slowest['ratio']:.1f} ({slowest['program']}), "
        + ", ".join(f"{r['program']} {r['ratio']:.1f}" for r in results["compile"]
                    if r["program"] in ("plan, output", "FuCa", "TeaCache"))
        + " (`--only compile`).",
    ]
    for wall in results["wall"]:
        lines += [
            "",
            f"Measured speed-up of the cached sampler on {wall['model']} (CPU, "
            f"N = {wall['interval']}): {wall['measured']:.2f}x, that is "
            f"{wall['efficiency']:.2f} of the ideal S/NFE = {wall['ideal']:.2f}x (median of "
            f"{len(wall['pairs'])} interleaved pairs).",
        ]
    return lines


def _claims(results) -> list[str]:
    """What the methods' papers and our targets claim, against what was measured."""
    rows = {(r["guidance"], r["interval"]): r for r in results["bars"]}
    settings = results["settings"]["bars"]
    every = (3, 4, 5, 6, 7, 8)
    checks = [
        ("BeziCast over TaylorSeer-1", "bezicast/taylor1", (3, 4, 5), 1.0),
        ("BeziCast over TaylorSeer-1", "bezicast/taylor1", (6, 7, 8), 0.85),
        ("FuCa (`x0`) over TaylorSeer-1", "fuca_x0/taylor1", every, 1.0),
        ("FuCa (default, `x0_damped`) over TaylorSeer-1", "fuca/taylor1", every, 1.0),
        ("FuCa (`x0`) on FADE over TaylorSeer-1", "fuca_fade_x0/taylor1", every[1:], 0.92),
        ("FuCa (default) on FADE over TaylorSeer-1", "fuca_fade/taylor1", every[1:], 0.92),
        ("FuCa, profiled, over TaylorSeer-1", "fuca_fit/taylor1", every, 0.85),
        ("Tikhonov term 1e-2 over none (four snapshots)", "ridge 1e-2 / ridge 0 (K=4)", every[1:],
         0.5),
        ("guard (2.5, 4) over none, no Tikhonov term", "guard (2.5, 4) / none (K=4, ridge 0)",
         every[2:], 0.55),
    ]
    lines = [
        "",
        "## Claims checked",
        "",
        f"Ratios of mean errors over {settings['train_seeds']} trained models with "
        f"{settings['samples']} fresh samples each (`--only bars`); a bar is met when every ratio "
        "is at or below it:",
        "",
        "| what | N | bar | guidance 1 | guidance 3 | mean | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, key, intervals, bar in checks:
        found = {g: [rows[g, n][key] for n in intervals] for g in (1.0, 3.0)}
        spread = lambda values: f"{min(values):.2f} to {max(values):.2f}"
        both = found[1.0] + found[3.0]
        met = "yes" if max(both) <= bar else "no"
        if met == "no" and sum(both) / len(both) <= bar:
            met = "in the mean"
        lines.append(
            f"| {title} | {intervals[0]} to {intervals[-1]} | {bar:g} | {spread(found[1.0])} | "
            f"{spread(found[3.0])} | {sum(both) / len(both):.2f} | {met} |"
        )
    share = results["heterogeneity"]
    lines += [
        "",
        f"A FADE table for each layer is at least as good as one shared set of parameters on "
        f"{100 * share['share']:.0f} % of layers on held-out samples (squared error "
        f"{share['error_ratio']:.2f} of the shared one's; `--only heterogeneity`).",
    ]
    return lines


def _peers() -> list[str]:
    data = json.loads((HERE / "results" / "torch_caches.json").read_text())
    versions = data["versions"]
    best: dict = {}
    for row in data["rows"]:
        target = row.get("target")
        if target is None:
            continue
        key = (row["library"], row["method"], target)
        if key not in best or row["relative_error"] < best[key]["relative_error"]:
            best[key] = row
    targets = data["targets"]
    names = list(dict.fromkeys((library, method) for library, method, _ in best))
    names = [n for n in names if all((*n, t) in best for t in targets)]
    names.sort(key=lambda n: best[(*n, targets[0])]["relative_error"])
    lines = [
        "",
        "## Beside cache-dit and diffusers",
        "",
        "The digits MMDiT, exported to torch's `FluxTransformer2DModel` (velocities agree to "
        f"{data['velocity_relative_difference']:.0e}): relative error to each framework's own full "
        "50-step run at equal computed steps, "
        f"{data['samples']} samples; in brackets the cost in matrix products, counted in full "
        "steps, and the speed-up measured on one CPU against the framework's own full run. Each "
        "method in its best setting of those tried on other samples "
        f"(diffusers {versions['diffusers']}, cache-dit {versions['cache-dit']}; "
        "`python benchmarks/torch_caches.py`, which also prints what did not run, and why):",
        "",
        "| library | method | " + " | ".join(f"{t} of 50" for t in targets) + " |",
        "|---" * (2 + len(targets)) + "|",
    ]
    for library, method in names:
        cells = []
        for t in targets:
            row = best[library, method, t]
            cells.append(
                f"{row['relative_error']:.4f} ({row['cost']:.0f}; {row['speedup']:.1f}x)"
            )
        lines.append(f"| {library} | {method} | " + " | ".join(cells) + " |")
    return lines


def render() -> str:
    """The Markdown between the markers."""
    results = json.loads((HERE / "results" / "caching.json").read_text())
    peer = json.loads((HERE / "results" / "diffusers_taylorseer.json").read_text())
    lines = [
        *_headline(results), *_methods(results), *_claims(results), *_peers(), *_costs(results)
    ]
    gaps = [o["difference"] for m in peer["models"].values() for o in m["orders"]]
    lines += [
        "",
        "The same TaylorSeer on the same weights in diffusers "
        f"{peer['versions']['diffusers']} gives the same relative error to within "
        f"{max(gaps):.0e} (`python benchmarks/diffusers_taylorseer.py`).",
        *tables_optim.render(),
        *tables_quant.render(),
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update the README")
    text = render()
    print(text)
    if parser.parse_args().write:
        readme = README.read_text()
        before, rest = readme.split(START)
        after = rest.split(END)[1]
        README.write_text(f"{before}{START}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
