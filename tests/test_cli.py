"""The command line: every error is one message with exit code 2, every result is on disk."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fadex
from fadex import _entry, cli
from fadex.cli import app

# One set of shapes for the whole file, so that its commands share compiled programs.
SMALL = ("--steps", "10", "--samples", "4", "--seed", "7")
ROW_KEYS = [
    "method", "interval", "guidance", "site", "nfe", "num_steps", "rel_error", "psnr",
    "agreement", "seconds", "speedup", "ideal_speedup",
]


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def succeed(*args):
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    # On a new machine matplotlib says that it builds its font cache.
    assert [line for line in result.stderr.splitlines() if "font cache" not in line] == []
    return result


def fail(*args):
    """The one message of a refused command."""
    result = run(*args)
    assert result.exit_code == 2, (result.exit_code, result.stdout)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fadex")
    assert "Traceback" not in result.stderr
    return lines[0]


# -- before anything is imported or computed ----------------------------------------------


@pytest.mark.smoke
def test_version_and_the_commands_are_listed():
    assert succeed("--version").stdout == f"fadex {fadex.__version__}\n"
    text = succeed("--help").stdout
    for command in ("train", "profile", "sample", "compare", "demo"):
        assert command in text


def test_no_command_shows_the_help_and_fails():
    result = run()
    assert result.exit_code == 2 and "compare" in result.stdout


@pytest.mark.parametrize("command, defaults", [
    ("demo", ["4,6", "out/demo", "64", "50", "the shipped digits model"]),
    ("compare", ["reuse,taylor1,ab2,fade", "4,6", "euler", "output", "64", "no file"]),
    ("sample", ["fade", "samples.png", "0,1,2,3,4,5,6,7,8,9", "profiled on the spot"]),
    ("profile", ["table.npz", "closed at the output, open elsewhere", "16", "off"]),
    ("train", ["1500", "48", "0.003", "digits", "OUT.state", "250", "resume"]),
])
def test_help_shows_every_default(command, defaults):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for default in defaults:
        assert default in text, default
    shown = [param for param in cli_command(command).params
             if param.name != "help" and not param.required]
    assert text.count("[default:") == len(shown)


def cli_command(name):
    from typer.main import get_command

    return get_command(app).commands[name]


def test_the_lists_of_names_are_those_of_the_library():
    from fadex.caching import compare, profile

    assert cli.METHODS == compare.METHOD_NAMES
    assert set(cli.SAMPLERS) == set(compare.GRID_METHODS)
    assert cli.SITES == profile.SITES
    assert set(cli.FADE_METHODS) == set(compare.PROFILED) - {"lsq"}


@pytest.mark.smoke
def test_help_and_refusals_do_not_import_jax():
    code = (
        "import sys\n"
        "from fadex.cli import app\n"
        "for args in (['--help'], ['compare', '--methods', 'nope'], ['train', '--out', '/'],\n"
        "             ['sample', '--checkpoint', '/nowhere']):\n"
        "    try: app(args)\n"
        "    except SystemExit as end: codes = end.code\n"
        "slow = {'jax', 'flax', 'matplotlib', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_named_in_one_line(monkeypatch, capsys):
    real = _entry.importlib.util.find_spec
    monkeypatch.setattr(
        _entry.importlib.util, "find_spec", lambda name: None if name == "typer" else real(name)
    )
    assert _entry.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "typer" in captured.err and "pip install 'fadex-jax[demo]'" in captured.err


@pytest.mark.smoke
def test_the_installed_command_refuses_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "fadex._entry", "compare", "--samples", "0"],
        capture_output=True, text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--samples'" in done.stderr and "'0'" in done.stderr and ">= 1" in done.stderr


@pytest.mark.parametrize("args, said", [
    (["nope"], ["nope"]),
    (["compare", "--bogus", "1"], ["--bogus"]),
    (["compare", "--samples"], ["--samples"]),
    (["train"], ["--out"]),
    (["compare", "--methods", "reuse,magic"], ["--methods", "'magic'", "taylor1", "dpmpp_2m"]),
    (["compare", "--methods", ""], ["--methods", "empty", "taylor1"]),
    (["compare", "--methods", "reuse,,fade"], ["--methods", "'reuse,,fade'", "taylor1"]),
    (["compare", "--sites", "output,head"], ["--sites", "'head'", "output, crf, module"]),
    (["compare", "--sampler", "rk4"], ["--sampler", "'rk4'", "euler, ab2, dpmpp_2m, heun"]),
    (["compare", "--intervals", "4,0"], ["--intervals", "'0'", "from 1 to 10000"]),
    (["compare", "--intervals", "4,x"], ["--intervals", "'x'", "integers", "commas"]),
    (["compare", "--intervals", "4,5.5"], ["--intervals", "'5.5'", "integers"]),
    (["compare", "--intervals", " , "], ["--intervals", "empty"]),
    (["compare", "--intervals", "9" * 500], ["--intervals", "integers"]),
    (["compare", "--guidance", "1,two"], ["--guidance", "'two'", "numbers", "commas"]),
    (["compare", "--guidance", "nan"], ["--guidance", "'nan'", "finite"]),
    (["compare", "--samples", "0"], ["--samples", "'0'", ">= 1"]),
    (["compare", "--samples", "-3"], ["--samples", "'-3'", ">= 1"]),
    (["compare", "--samples", "many"], ["--samples", "'many'", "an integer"]),
    (["compare", "--repeats", "0"], ["--repeats", "'0'", ">= 1"]),
    (["compare", "--profile-samples", "0"], ["--profile-samples", "'0'", ">= 1"]),
    (["compare", "--steps", "0"], ["--steps", "'0'", "from 1 to"]),
    (["compare", "--warmup", "0"], ["--warmup", "'0'", "from 1 to"]),
    (["compare", "--seed", "-1"], ["--seed", "'-1'", "from 0 to"]),
    (["compare", "--plot", "curve.jpg"], ["--plot", "'curve.jpg'", ".png"]),
    (["demo", "--guidance", "inf"], ["--guidance", "'inf'", "finite"]),
    (["demo", "--intervals", "0"], ["--intervals", "'0'"]),
    (["profile", "--mode", "ajar"], ["--mode", "'ajar'", "closed, open"]),
    (["profile", "--out", "table.bin"], ["--out", "'table.bin'", ".npz"]),
    (["profile", "--interval", "0"], ["--interval", "'0'"]),
    (["sample", "--method", "magic"], ["--method", "'magic'", "full", "taylor1"]),
    (["sample", "--labels", "3,10"], ["--labels", "'10'", "from 0 to 9"]),
    (["sample", "--out", "picture"], ["--out", "'picture'", ".png"]),
    (["sample", "--npz", "arrays.txt"], ["--npz", "'arrays.txt'", ".npz"]),
    (["sample", "--table", "nowhere.npz"], ["--table", "'nowhere.npz'", "fadex profile"]),
    (["sample", "--table", "t.npz", "--method", "reuse"], ["--table", "reuse", "fade"]),
    (["train", "--out", "m", "--learning-rate", "0"], ["--learning-rate", "'0'", "> 0"]),
    (["train", "--out", "m", "--steps", "0"], ["--steps", "'0'", ">= 1"]),
    *[([command, "--checkpoint", "/no/where"], ["--checkpoint", "/no/where", "fadex train"])
      for command in ("demo", "compare", "sample", "profile")],
])
def test_a_wrong_argument_is_one_message_with_option_value_and_choices(args, said):
    message = fail(*args)
    for text in said:
        assert text in message


@pytest.mark.parametrize("args, option", [
    (["compare", "--json"], "--json"),
    (["sample", "--out"], "--out"),
    (["profile", "--out"], "--out"),
    (["demo", "--out"], "--out"),
    (["train", "--out"], "--out"),
])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, args, option):
    (tmp_path / "file").write_text("")
    name = {"sample": "x.png", "profile": "x.npz"}.get(args[0], "x")
    message = fail(*args, tmp_path / "file" / name)
    assert f"'{option}'" in message and "is not a folder" in message


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    assert "is a folder" in fail("compare", "--json", tmp_path)
    assert "is a file" in fail("demo", "--out", __file__)


def test_train_never_replaces_what_is_no_checkpoint(tmp_path):
    out = tmp_path / "weights"
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    assert "--overwrite" in fail("train", "--out", out)
    assert "never replaced" in fail("train", "--out", out, "--overwrite")
    message = fail("train", "--out", tmp_path / "new", "--state", out)
    assert "'--state'" in message and "no training state" in message
    assert (out / "thesis.txt").read_text() == "years"


# -- with the model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    import shutil

    from fadex.models import shipped_checkpoint

    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(shipped_checkpoint(), folder)
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return folder


def test_a_damaged_checkpoint_is_refused(damaged, tmp_path):
    message = fail("compare", "--checkpoint", damaged, *SMALL)
    assert "'--checkpoint'" in message and str(damaged) in message and "damaged" in message
    message = fail("profile", "--checkpoint", tmp_path, "--out", tmp_path / "t.npz")
    assert "'--checkpoint'" in message and "fadex train" in message


def test_an_error_of_the_library_names_the_option(tmp_path):
    out = ("--out", tmp_path / "t.npz", "--steps", "10")
    message = fail("profile", "--mode", "closed", "--site", "module", *out)
    assert "'--mode'" in message and "closed" in message and "module" in message
    message = fail("profile", "--sampler", "heun", *out)
    assert "'--sampler'" in message and "heun" in message
    assert not (tmp_path / "t.npz").exists()


def test_training_data_of_another_shape_are_refused(tmp_path):
    message = fail("train", "--out", tmp_path / "m", "--data", "cats")
    assert "'--data'" in message and "'cats'" in message and "digits" in message
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    folder.mkdir()
    image.fromarray(np.zeros((12, 10), np.uint8)).save(folder / "a.png")
    message = fail("train", "--out", tmp_path / "m", "--data", f"folder:{folder}")
    assert "'--data'" in message and "12 x 10 x 1" in message and "8 x 8 x 1" in message
    assert not (tmp_path / "m").exists() and not (tmp_path / "m.state").exists()


COMPARE = (
    "compare", "--methods", "reuse,fade", "--intervals", "3,1", "--guidance", "1",
    "--profile-samples", "4", "--repeats", "1", "--warmup", "3", "--steps", "10", "--samples", "4",
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "new" / "folders"
    outputs = {}
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        file = folder / f"{name}.json"
        result = succeed(*COMPARE, "--seed", seed, "--json", file, "--plot", folder / "plot.png")
        outputs[name] = (result.stdout, file)
    return outputs


def strict_json(file):
    def refuse(text):
        raise ValueError(f"{text} is no JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


@pytest.mark.smoke
def test_compare_writes_a_list_of_rows_with_exactly_the_keys(compared):
    stdout, file = compared["first"]
    rows = strict_json(file)
    assert all(list(row) == ROW_KEYS for row in rows)
    found = [(row["method"], row["interval"], row["nfe"]) for row in rows]
    assert found == [
        ("full", 1, 10), ("reuse", 3, 6), ("fade", 3, 6), ("reuse", 1, 10), ("fade", 1, 10),
    ]
    for row in rows:
        assert row["site"] == "output" and row["guidance"] == 1.0 and row["num_steps"] == 10
        assert row["ideal_speedup"] == 10 / row["nfe"]
        assert row["seconds"] > 0 and row["speedup"] > 0 and 0 <= row["agreement"] <= 1
        exact = row["interval"] == 1
        assert (row["rel_error"] == 0) == exact
        assert (row["psnr"] is None) == exact  # infinite: JSON has no word for it
    for text in ("1.7x", " dB", "100.0 %", "4 samples, seed 7"):
        assert text in stdout
    assert file.with_name("plot.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(file.parent)) == [
        "again.json", "first.json", "other.json", "plot.png"
    ]


def test_all_stands_for_every_method_that_runs_there():
    from fadex._demo import methods_for
    from fadex.caching.compare import ALL_METHODS, METHOD_NAMES

    assert set(ALL_METHODS) <= set(METHOD_NAMES)
    assert methods_for(["all"], "euler", ["output"]) == list(ALL_METHODS)
    assert methods_for(["all", "fuca_none", "fade"], "euler", ["output"]) == [
        *ALL_METHODS, "fuca_none"
    ]
    assert methods_for(["reuse"], "ab2", ["crf"]) == ["reuse"]
    on_top = methods_for(["all"], "ab2", ["output"])
    assert "fuca" not in on_top and "fuca_placed" not in on_top and "fade" in on_top
    inside = methods_for(["all"], "euler", ["module"])
    assert "fuca" not in inside and "toca" in inside and "ab2" in inside


def test_the_pareto_front_is_what_nothing_beats():
    from fadex._pictures import pareto_front, tradeoff_picture

    rng = np.random.default_rng(0)
    points = [(float(a), float(b)) for a, b in rng.integers(1, 9, (40, 2))]
    beaten = lambda p: any(
        q[0] >= p[0] and q[1] <= p[1] and q != p for q in points
    )
    assert pareto_front(points) == sorted({p for p in points if not beaten(p)})
    rows = [
        dict(method=m, guidance=g, site=site, ideal_speedup=s, rel_error=e)
        for g in (1.0, 3.0)
        for m, site, s, e in [
            ("fade", "output", 2.0, 0.01), ("fade", "output", 4.0, 0.03),
            ("fade", "crf", 2.0, 0.012), ("teacache", "crf", 3.0, 0.02),
            ("ab2", "output", 4.0, 0.02), ("full", "output", 1.0, 0.0),
        ]
    ]
    figure = tradeoff_picture(rows, ["output", "crf"])
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 4
    # Each panel: FADE there, TaylorSeer's rivals with places of their own, and the front.
    drawn = [line.get_xydata().tolist() for line in panels[0].lines]
    assert [[2.0, 0.01], [4.0, 0.03]] in drawn and [[3.0, 0.02]] in drawn
    assert [[2.0, 0.01], [4.0, 0.02]] in drawn
    assert [[2.0, 0.012]] in [line.get_xydata().tolist() for line in panels[1].lines]


def test_methods_that_do_not_run_there_are_named(tmp_path):
    message = fail("compare", "--methods", "fuca", "--sampler", "ab2", *SMALL)
    assert "'fuca' does not run on top of this sampler" in message
    message = fail("compare", "--methods", "fuca", "--sites", "module", *SMALL)
    assert "'fuca' does not cache at module" in message
    out = ("--out", tmp_path / "x.png")
    message = fail("sample", "--method", "fuca", "--sampler", "heun", *out, *SMALL)
    assert "--sampler" in message and "fuca does not run on top of 'heun'" in message
    message = fail("sample", "--method", "fuca_fit", "--site", "crf", *out, *SMALL)
    assert "--site" in message and "fuca_fit does not cache at 'crf'" in message
    assert not (tmp_path / "x.png").exists()


def test_sample_draws_with_a_method_that_has_a_loop_of_its_own(tmp_path):
    file = tmp_path / "fuca.png"
    result = succeed("sample", "--method", "fuca", "--out", file, "--interval", "3", *SMALL)
    assert "FuCa: 6 of 10 steps computed" in result.stdout
    assert file.read_bytes().startswith(b"\x89PNG")
    # A coarse grid computes all of its steps, wherever they are.
    result = succeed("sample", "--method", "ab2_placed", "--out", file, "--interval", "3", *SMALL)
    assert "all 6 steps computed" in result.stdout


def test_compare_depends_on_the_seed_and_on_nothing_else(compared):
    errors = {
        name: [row["rel_error"] for row in strict_json(file)]
        for name, (_, file) in compared.items()
    }
    assert errors["first"] == errors["again"]
    assert errors["first"] != errors["other"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    file = tmp_path_factory.mktemp("table") / "deep" / "table.npz"
    result = succeed("profile", "--out", file, "--interval", "3", *SMALL)
    return file, result.stdout


def test_profile_prints_the_operators_and_writes_the_table(table):
    from fadex.caching import load_lut

    file, text = table
    lut = load_lut(file)
    assert lut.schedule.anchors == (0, 1, 2, 5, 8, 9) and lut.samples == 4
    assert "alpha" in text and "lambda" in text and "order" in text
    for s in lut.schedule.skipped:
        assert f"{lut.params.alpha[s, 0]:.2f}" in text
    assert "6 of 10 steps are computed, 4 forecast; closed loop at output" in text


SAMPLE = ("sample", "--interval", "3", *SMALL)


def test_sample_uses_the_table_and_writes_picture_and_arrays(table, tmp_path):
    png, npz = tmp_path / "a" / "x.png", tmp_path / "b" / "x.npz"
    result = succeed(*SAMPLE, "--table", table[0], "--labels", "3,3,5", "--out", png, "--npz", npz)
    assert "6 of 10 steps computed" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    with np.load(npz) as data:
        assert data["labels"].tolist() == [3, 3, 5, 3]
        assert data["images"].shape == (4, 8, 8, 1)
        assert np.all(np.isfinite(data["images"]))


def test_a_table_that_does_not_match_is_refused(table, tmp_path):
    file, _ = table
    out = ("--out", tmp_path / "x.png")
    for change, said in (
        (["--guidance", "3"], ["'--table'", "profiled at 1.0", "uses 3.0"]),
        (["--interval", "4"], ["'--table'", "profiled for anchors (0, 1, 2, 5, 8, 9)"]),
        (["--steps", "12"], ["'--table'", "num_steps=10", "num_steps=12"]),
        (["--site", "crf"], ["'--site'", "'output'", "'crf'"]),
        (["--sampler", "ab2"], ["'--sampler'", "'euler'", "'ab2'"]),
    ):
        message = fail(*SAMPLE, "--table", file, *out, *change)
        assert all(text in message for text in said), message
        assert "strict" not in message
    broken = tmp_path / "broken.npz"
    broken.write_bytes(file.read_bytes()[:-200])
    message = fail(*SAMPLE, "--table", broken, *out)
    assert "'--table'" in message and str(broken) in message
    assert not (tmp_path / "x.png").exists()


@pytest.fixture
def quick_compile():
    """Half the optimization, half the wait: for programs that are compiled to run three times."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_compile")
def test_train_goes_on_after_an_interruption_as_if_nothing_had_been(tmp_path, monkeypatch, table):
    from fadex import _pictures
    from fadex.core import checkpoint

    train = ("train", "--steps", "3", "--batch-size", "4", "--save-every", "1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    state = tmp_path / "broken.state"
    text = succeed(*train, "--out", whole).stdout
    assert "Trained to step 3" in text and "loss" in text
    assert not (tmp_path / "whole.state").exists()

    @contextmanager
    def interrupted(total):
        def stage(text, step=None):
            if step == 2:
                raise KeyboardInterrupt

        yield stage

    with monkeypatch.context() as patch:
        patch.setattr(_pictures, "stages", interrupted)
        result = run(*train, "--out", broken)
    assert result.exit_code == 130 and "Traceback" not in result.stderr
    assert str(state) in result.stderr and not broken.exists()

    message = fail(*train, "--out", broken, "--seed", "5")
    assert "'--state'" in message and "--seed 0 (now 5)" in message and "--no-resume" in message
    assert "from step 1 on" in succeed(*train, "--out", broken).stdout
    assert not state.exists()
    left, right = checkpoint.restore(whole), checkpoint.restore(broken)
    for a, b in zip(flat(left), flat(right), strict=True):
        np.testing.assert_array_equal(a, b)
    assert checkpoint.read_manifest(whole)["metadata"]["steps"] == 3

    # The new weights work everywhere, and a table of other weights does not fit them.
    succeed(*SAMPLE, "--method", "full", "--checkpoint", whole, "--out", tmp_path / "x.png")
    message = fail(*SAMPLE, "--checkpoint", whole, "--table", table[0], "--out", tmp_path / "y.png")
    assert "'--table'" in message and "not the model" in message


def flat(tree):
    import jax

    return jax.tree.leaves(tree)


def test_demo_writes_pictures_and_report(tmp_path):
    out = tmp_path / "out" / "demo"
    result = succeed(
        "demo", "--out", out, "--intervals", "3", "--repeats", "1", "--profile-samples", "4", *SMALL
    )
    assert sorted(os.listdir(out)) == ["error.png", "report.json", "samples.png"]
    for name in ("error.png", "samples.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    report = strict_json(out / "report.json")
    assert [row["method"] for row in report["rows"]] == ["full", "taylor1", "ab2", "fade"]
    assert {row["nfe"] for row in report["rows"][1:]} == {6}
    assert report["settings"]["samples"] == 4 and report["settings"]["checkpoint"] == "shipped"
    assert report["machine"]["versions"]["jax"] and report["classifier_test_accuracy"] > 0.97
    # The curves end where the table of results says.
    for row in report["rows"][1:]:
        curve = report["trajectory"]["curves"][row["method"]]
        assert curve["t"][0] == 1 and curve["t"][-1] == 0 and curve["rel_error"][0] == 0
        assert curve["rel_error"][-1] == pytest.approx(row["rel_error"], rel=1e-3)
    for text in ("TaylorSeer", "AB2", "FADE", "1.7x", "Full run", "FADE's error at N = 3"):
        assert text in result.stdout
    assert str(Path(out) / "report.json") in result.stdout
