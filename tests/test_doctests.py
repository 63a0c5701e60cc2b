"""Every example in a docstring runs.

Modules are imported by their ``fadex.`` name: pytest's own ``--doctest-modules`` goes by file,
and under the package mapping (``optim/`` is ``fadex.optim``) imports a second copy.
"""

import doctest
import importlib
import pkgutil

import pytest

import fadex


def modules():
    """Names of all modules, those in the folders mapped below ``fadex`` included."""
    yield "fadex"
    yield from (m.name for m in pkgutil.walk_packages(fadex.__path__, "fadex."))
    for name in (f"fadex.{n}" for n in fadex.__all__ if not n.startswith("_")):
        yield name
        path = importlib.import_module(name).__path__
        yield from (m.name for m in pkgutil.walk_packages(path, f"{name}."))


MODULES = sorted(set(modules()))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert not failed


def test_examples_of_jitted_functions_and_of_mapped_folders_are_found():
    assert {"fadex.optim", "fadex.quant", "fadex.solvers", "fadex.caching.fade"} <= set(MODULES)
    found = doctest.DocTestFinder().find(importlib.import_module("fadex.models.digits"))
    assert any(test.examples for test in found)
