"""The sdist and the wheel hold everything, and work away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest

import fadex

ROOT = Path(__file__).resolve().parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = CONFIG["tool"]["setuptools"]["packages"]
FOLDERS = CONFIG["tool"]["setuptools"]["package-dir"]
NOT_OURS = ("tests", "benchmarks", "colabs", "scripts", "build", "dist", "out")


def packages_in(root):
    """Import names of all folders with an ``__init__.py``, by the mapping of pyproject.toml."""
    names = {folder: name for name, folder in FOLDERS.items()}
    found = []
    for top in sorted(p for p in root.iterdir() if p.is_dir()):
        if top.name.startswith(".") or top.name in NOT_OURS:
            continue
        for init in top.rglob("__init__.py"):
            first, *rest = init.parent.relative_to(root).parts
            found.append(".".join([names.get(first, first), *rest]))
    return sorted(found)


def assets_in(root):
    files = (p for p in (root / "fadex/assets").rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix() for p in files}


def run(*command, cwd, **env):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env = kept | {"PYTHONSAFEPATH": "1"} | env
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, the wheel built from it, and an environment that holds the wheel.

    Built from a copy, because an old ``egg-info`` would hide a forgotten file; without
    isolation, because that would need a network.
    """
    tmp = tmp_path_factory.mktemp("packaging")
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", ".models", ".*_cache", ".cache", "__pycache__", "*.egg-info",
        "build", "dist", "out",
    )  # fmt: skip
    shutil.copytree(ROOT, tmp / "source", ignore=ignore)
    run(sys.executable, "-m", "build", "--no-isolation", "-o", tmp / "dist", tmp / "source",
        cwd=tmp)
    (sdist,) = (tmp / "dist").glob("*.tar.gz")
    (wheel,) = (tmp / "dist").glob("*.whl")

    # A path line in a .pth file adds that folder but doesn't run the .pth files in it: the
    # environment sees the dependencies of this one, not its editable install of the checkout.
    run(sys.executable, "-m", "venv", "--without-pip", tmp / "env", cwd=tmp)
    (site,) = (tmp / "env").glob("lib/python*/site-packages")
    paths = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    run(sys.executable, "-m", "pip", "--python", tmp / "env/bin/python", "install", "--quiet",
        "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=tmp)
    empty = tmp / "elsewhere"
    empty.mkdir()
    return SimpleNamespace(
        sdist=sdist, wheel=wheel, bin=tmp / "env/bin", site=site, elsewhere=empty
    )


def test_every_package_folder_is_in_the_list():
    assert packages_in(ROOT) == sorted(PACKAGES)
    assert sorted(n for n in fadex.__all__ if not n.startswith("_")) == sorted(
        n.removeprefix("fadex.") for n in PACKAGES if n.count(".") == 1
    )


def test_a_forgotten_folder_is_noticed(tmp_path):
    for name in PACKAGES:
        parts = Path(FOLDERS.get(name, name.replace(".", "/")))
        (tmp_path / parts).mkdir(parents=True, exist_ok=True)
        (tmp_path / parts / "__init__.py").touch()
    assert packages_in(tmp_path) == sorted(PACKAGES)
    for folder in ("quant/vector", "fadex/core/inner", "fifth"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    forgotten = set(packages_in(tmp_path)) - set(PACKAGES)
    assert forgotten == {"fadex.quant.vector", "fadex.core.inner", "fifth"}


def test_the_wheel_holds_every_module_and_every_asset_under_one_name(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(wheel.read(metadata).decode())
    expected = {"fadex/py.typed", *assets_in(ROOT)}
    for name in PACKAGES:
        parts = name.split(".")
        deepest = next(i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in FOLDERS)
        folder = Path(FOLDERS[".".join(parts[:deepest])], *parts[deepest:])
        expected |= {f"{name.replace('.', '/')}/{p.name}" for p in (ROOT / folder).glob("*.py")}
    info = metadata.split("/")[0]
    assert {n for n in names if not n.startswith(info)} == expected
    assert f"{info}/licenses/LICENSE" in names
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Version"] == fadex.__version__


def test_the_sdist_holds_the_assets_and_what_its_tests_and_commands_need(built):
    with tarfile.open(built.sdist) as sdist:
        names = {n.split("/", 1)[1] for n in sdist.getnames() if "/" in n}
    assert assets_in(ROOT) <= names
    assert {"Makefile", "LICENSE", "CHANGELOG.md", ".ci/run", "scripts/test_latest.sh"} <= names
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.*") if p.is_file()}
    tests = {t for t in tests if "/." not in t and "__pycache__" not in t}
    assert tests <= names, f"MANIFEST.in forgets {sorted(tests - names)}"


def test_every_subpackage_imports_from_the_wheel_and_the_shipped_checkpoint_loads(built):
    code = f"""
import importlib, importlib.resources, pathlib, fadex
site = pathlib.Path({str(built.site)!r}).resolve()
for name in {PACKAGES!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).resolve().is_relative_to(site), module.__file__
assert importlib.resources.files("fadex").joinpath("py.typed").is_file()
from fadex.models import load_digits_dit, shipped_checkpoint
assert shipped_checkpoint().resolve().is_relative_to(site)
denoiser, params = load_digits_dit()
import jax
print(fadex.__version__, sum(leaf.size for leaf in jax.tree.leaves(params)) > 10_000)
"""
    out = run(built.bin / "python", "-c", code, cwd=built.elsewhere)
    assert out.split() == [fadex.__version__, "True"]


def test_the_command_runs_from_the_wheel(built):
    assert fadex.__version__ in run(built.bin / "fadex", "--version", cwd=built.elsewhere)
    run(built.bin / "fadex", "demo", "--out", "demo", "--samples", "4", "--steps", "10",
        "--intervals", "3", "--guidance", "1", "--profile-samples", "4", "--repeats", "1",
        cwd=built.elsewhere)
    written = {p.name for p in (built.elsewhere / "demo").iterdir()}
    assert {"samples.png", "error.png", "report.json"} <= written


def test_the_version_is_the_same_wherever_it_is_written():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == fadex.__version__
    assert f"\n## {fadex.__version__}" in (ROOT / "CHANGELOG.md").read_text()
