"""The prepared device script runs, finds every kernel, and measures nothing where none can be."""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_kernels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("device_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kernel_runs_and_agrees(script, tmp_path, monkeypatch):
    # Compiled in a hurry: the sizes are tiny.
    hurry = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    monkeypatch.setattr(script.jax, "jit", hurry)
    out = tmp_path / "report.json"
    assert script.main(["--interpret", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert all(row["correct"] for row in rows)
    assert {row["form"] for row in rows} == {"gpu", "tpu"}
    assert {row["kernel"] for row in rows} == {
        "w4a16", "fused_quantize", "weighted_sum", "gated_forecast", "newton_schulz resident",
        "symmetric_product",
    }
    assert not any("milliseconds" in row for row in rows)


def test_a_wrong_kernel_is_reported(script):
    entry = next(iter(script.caching_entries(True)))
    broken = lambda weights, history, interpret: 1.1 * entry.reference(weights, history)
    row = script.measure(entry._replace(forms={"gpu": broken}), "gpu", None)
    assert not row["correct"] and row["error"] > 0.05
    assert "WRONG" in script.describe(row)


def test_every_module_with_a_kernel_is_measured():
    root = SCRIPT.parents[1]
    holds = {
        path.relative_to(root).as_posix()
        for folder in ("fadex", "optim", "quant", "solvers")
        for path in (root / folder).rglob("*.py") if "pallas_call(" in path.read_text()
    }
    assert holds == {
        "fadex/caching/kernels.py", "fadex/models/kernels.py", "optim/kernels/newton_schulz.py",
        "quant/kernels/fused_quantize.py", "quant/kernels/w4a16.py",
    }


def test_rows_hold_what_was_measured(script):
    # The references in place of the kernels: what a device would run, on this machine.
    entry = next(iter(script.caching_entries(True)))
    plain = lambda weights, history, interpret: entry.reference(weights, history)
    limits = {"copy_bytes_per_second": 1e9, "bfloat16_flop_per_second": 1e9}
    row = script.measure(entry._replace(forms={"gpu": plain}), "gpu", limits)
    assert row["correct"] and row["milliseconds"] > 0
    assert row["fraction_of_copy"] == row["bytes_per_second"] / 1e9
    assert row["bytes_per_second"] * row["milliseconds"] / 1e3 == pytest.approx(entry.bytes)
    assert "GB/s" in script.describe(row)


def test_says_so_without_an_accelerator(script, capsys, tmp_path):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("there is an accelerator")
    assert script.main(["--out", str(tmp_path / "none.json")]) == 0
    assert "No GPU or TPU" in capsys.readouterr().out
    assert not (tmp_path / "none.json").exists()
