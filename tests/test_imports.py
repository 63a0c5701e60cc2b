"""What a user gets from an import: names that exist and are explained, quickly."""

import importlib
import inspect
import json
import re
import statistics
import subprocess
import sys

import pytest

import fadex

SUBPACKAGES = [name for name in fadex.__all__ if not name.startswith("_")]
BASE = "import jax, flax.nnx"
ALL = f"from fadex import {', '.join(SUBPACKAGES)}"


def fresh(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.smoke
def test_importing_everything_leaves_the_heavy_packages_out():
    before, after = fresh(
        f"import sys, json\n{BASE}\nbefore = list(sys.modules)\n{ALL}\n"
        "print(json.dumps([before, list(sys.modules)]))"
    )
    never = {
        "torch", "tensorflow", "tensorflow_datasets", "matplotlib", "sklearn", "diffusers",
        "array_record", "PIL", "safetensors", "typer",
    }  # fmt: skip
    # Flax brings some of these along by itself, depending on its release.
    ours_not = {"rich", "orbax.checkpoint", "tensorstore", "IPython"}
    assert sorted(never & set(after)) == []
    assert sorted(ours_not & (set(after) - set(before))) == []


def test_importing_everything_adds_less_than_eight_tenths_of_a_cpu_second():
    # CPU seconds of the process, not wall time: other work on the machine doesn't count.
    added = [
        fresh(
            f"import time\n{BASE}\nstart = time.process_time()\n{ALL}\n"
            "print(time.process_time() - start)"
        )
        for _ in range(5)
    ]
    print("CPU seconds added to `import jax, flax.nnx`:", sorted(round(s, 2) for s in added))
    assert statistics.median(added) <= 0.8


@pytest.mark.smoke
def test_the_bare_package_imports_nothing_and_gives_its_subpackages_when_touched():
    assert fresh(
        "import sys, json, fadex\nlight = 'jax' not in sys.modules\n"
        "print(json.dumps([light, fadex.solvers.__name__, fadex.__version__]))"
    ) == [True, "fadex.solvers", fadex.__version__]
    assert set(SUBPACKAGES) <= set(dir(fadex))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fadex.nothing  # noqa: B018


def is_explained(thing):
    doc = inspect.getdoc(thing) or ""
    # NamedTuple and dataclass write their own signature where nobody wrote a sentence.
    return bool(doc.strip()) and not doc.startswith(f"{getattr(thing, '__name__', '')}(")


def order(name):
    """Constants, classes, functions, each in natural order: what ruff's RUF022 asks for."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]


@pytest.mark.smoke
@pytest.mark.parametrize("name", SUBPACKAGES)
def test_every_public_name_exists_is_sorted_and_is_explained(name):
    module = importlib.import_module(f"fadex.{name}")
    public = module.__all__
    assert public == sorted(public, key=order)
    assert len(public) == len(set(public))
    assert is_explained(module)
    things = {n: getattr(module, n) for n in public}
    mute = [n for n, t in things.items() if callable(t) and not is_explained(t)]
    assert not mute, f"without a docstring: {mute}"
