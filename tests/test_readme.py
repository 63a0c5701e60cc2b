"""The README says what the benchmarks printed, and what the package really offers."""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_of_the_benchmark_results():
    module = tables()
    kept = README.split(module.START)[1].split(module.END)[0].strip()
    assert kept == module.render().strip(), "run: python benchmarks/tables.py --write"


def test_every_import_name_in_the_table_exists():
    module = tables()
    for _, path, *_ in [
        *module.METHODS, *module.tables_optim.METHODS, *module.tables_quant.METHODS
    ]:
        first, *others = path.split(", ")
        module, name = re.sub(r"\(.*", "", first).rsplit(".", 1)
        for attribute in (name, *others):
            assert hasattr(importlib.import_module(module), attribute), path


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
