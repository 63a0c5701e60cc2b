"""All benchmarks of the optimizers, part by part.

    python benchmarks/optim.py                       # every part; training goes on where it was
    python benchmarks/optim.py --only rates,overhead

* ``rates``: slopes of scalar AcceleGrad# (``optim_rates.py``, the shortest);
* ``polar``: polar factors side by side with the peers' (``optim_polar.py``);
* ``overhead``: time of a step against adamw and Muon (``optim_overhead.py``);
* ``momentum``: the interpolation rule (``optim_momentum.py``);
* ``river``: river valleys and dual-anchor (``optim_river.py``);
* ``training``: digits and the character transformer (``optim_training.py``, by far the longest,
  resumable);
* ``river_lm``: where heavy ball is stable on the transformer (``optim_river_lm.py``, resumable).

Each writes its file in ``benchmarks/results`` and prints its table.
"""

from __future__ import annotations

import argparse
import importlib

PARTS = {
    "rates": ("optim_rates", "run"), "polar": ("optim_polar", "run"),
    "overhead": ("optim_overhead", "run"), "momentum": ("optim_momentum", "run"),
    "river": ("optim_river", "run"), "training": ("optim_training", "run"),
    "river_lm": ("optim_river_lm", "run_river"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    names = [name for name in parser.parse_args().only.split(",") if name]
    for name in names:
        if name not in PARTS:
            parser.error(f"--only: expected some of {', '.join(PARTS)}, got {name!r}")
    for name in names:
        print(f"\n== {name}", flush=True)
        module, function = PARTS[name]
        module = importlib.import_module(module)
        getattr(module, function)(module.RESULTS)


if __name__ == "__main__":
    main()
