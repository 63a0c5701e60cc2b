"""Print the README's figures from the results of the benchmarks.

    python benchmarks/tables.py            # print
    python benchmarks/tables.py --write    # and put them between the README's markers

A test compares the README with what this prints, so no figure there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START, END = "<!-- figures: benchmarks/tables.py -->", "<!-- end of figures -->"

# (name, import name, source, status, key in the results)
METHODS = [
    ("FADE", "fadex.caching.profile_fade", "abstract; a reconstruction", "done", "fade"),
    ("FADE, amplitude", "fadex.caching.profile_fade(amplitude=True)",
     "abstract; a reconstruction", "done", "fade_amplitude"),
    ("FADE, open loop", 'fadex.caching.profile_fade(mode="open")', "abstract; a reconstruction",
     "done", "fade_open"),
    ("TaylorSeer, order 1", "fadex.caching.taylorseer(1)", "arXiv 2503.06923", "done", "taylor1"),
    ("TaylorSeer, order 2", "fadex.caching.taylorseer(2)", "arXiv 2503.06923", "done", "taylor2"),
    ("HiCache", "fadex.caching.hicache", "arXiv 2508.16984", "done", "hicache2"),
    ("FoCa", "fadex.caching.foca", "arXiv 2508.16211", "done; equals TaylorSeer-1", None),
    ("Newton", "fadex.caching.newton", "textbook", "done", None),
    ("Least squares, K = 3", "fadex.caching.profile_least_squares", "after arXiv 2604.26365",
     "done", "lsq"),
    ("Reuse", "fadex.caching.reuse", "FORA arXiv 2407.01425", "done", "reuse"),
    ("AB2 on a coarse grid", "fadex.sampling.ab2", "textbook", "done", "ab2"),
    ("DPM-Solver++(2M) on a coarse grid", "fadex.sampling.dpmpp_2m", "arXiv 2211.01095", "done",
     "dpmpp_2m"),
    ("Euler, Heun", "fadex.sampling.flow_euler, flow_heun", "textbook", "done", None),
    ("DDIM", "fadex.sampling.ddim", "arXiv 2010.02502", "done", None),
    ("DiT", "fadex.models.DiT", "arXiv 2212.09748", "done", None),
    ("Mittag-Leffler function", "fadex.core.special.mittag_leffler", "Laplace inversion",
     "done", None),
]


def render() -> str:
    """The Markdown between the markers."""
    results = json.loads((HERE / "results" / "caching.json").read_text())
    peer = json.loads((HERE / "results" / "diffusers_taylorseer.json").read_text())
    rows = {(r["guidance"], r["interval"], r["method"]): r for r in results["table"]}
    intervals = sorted({interval for _, interval, _ in rows})
    settings = results["settings"]["table"]
    nfe = {n: rows[1.0, n, "fade"]["nfe"] for n in intervals}
    lines = [
        "## Methods and measured figures",
        "",
        "Relative error to the full 50-step run on the digits DiT at guidance 3, at equal numbers "
        f"of model evaluations (mean over {settings['train_seeds']} trained models and "
        f"{settings['samples']} fresh samples each; `python benchmarks/caching.py`):",
        "",
        "| method | import | source | status | "
        + " | ".join(f"{nfe[n]} of 50" for n in intervals) + " |",
        "|---" * (4 + len(intervals)) + "|",
    ]
    for name, path, source, status, key in METHODS:
        cells = [f"{rows[3.0, n, key]['rel_error']:.4f}" if key else "" for n in intervals]
        lines.append(f"| {name} | `{path}` | {source} | {status} | " + " | ".join(cells) + " |")
    lines += ["", "FADE's error over TaylorSeer-1's, with 95 % bootstrap intervals, and over that "
              "of AB2 on a coarse grid:", "",
              "| guidance | | " + " | ".join(f"N = {n}" for n in intervals) + " |",
              "|---" * (2 + len(intervals)) + "|"]
    for guidance in (1.0, 3.0):
        ours = [rows[guidance, n, "fade"] for n in intervals]
        grid = [rows[guidance, n, "ab2"] for n in intervals]
        lines.append(f"| {guidance:g} | to TaylorSeer-1 | " + " | ".join(
            f"{r['ratio']:.2f} [{r['ratio_low']:.2f}, {r['ratio_high']:.2f}]" for r in ours) + " |")
        lines.append(f"| {guidance:g} | to the AB2 grid | " + " | ".join(
            f"{r['rel_error'] / g['rel_error']:.2f}" for r, g in zip(ours, grid)) + " |")
    ahead = [f"N = {n} at guidance {g:g}" for g in (1.0, 3.0) for n in intervals
             if rows[g, n, "fade"]["rel_error"] > rows[g, n, "ab2"]["rel_error"]]
    if ahead:
        lines += ["", "A coarse grid with AB2 is ahead of FADE at " + ", ".join(ahead) + "."]
    for wall in results["wall"]:
        lines += [
            "",
            f"Measured speed-up of the cached sampler on {wall['model']} (CPU, "
            f"N = {wall['interval']}): {wall['measured']:.2f}x, that is "
            f"{wall['efficiency']:.2f} of the ideal S/NFE = {wall['ideal']:.2f}x (median of "
            f"{len(wall['pairs'])} interleaved pairs).",
        ]
    gaps = [o["difference"] for m in peer["models"].values() for o in m["orders"]]
    lines += [
        "",
        "The same TaylorSeer on the same weights in diffusers "
        f"{peer['versions']['diffusers']} gives the same relative error to within "
        f"{max(gaps):.0e} (`python benchmarks/diffusers_taylorseer.py`).",
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
