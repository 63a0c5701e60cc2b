"""`make test-latest`, `.ci/run` and the Makefile's set-up, on machines of fake interpreters."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASH = shutil.which("bash")

# What pyenv leaves on PATH for versions that are not selected.
FAILING_SHIM = """#!{bash}
echo "pyenv: $(basename "$0"): command not found" >&2
exit 127
"""

# Notes what it is asked to do, and is its own virtual environment.
FAKE_PYTHON = """#!{bash}
if [[ $1 == -c ]]; then
  case $2 in
    *version_info?\\<*) {old_enough} ;;
    *version_info*) echo {version} ;;
  esac
  exit
fi
echo "{version} $*" >>"{log}"
for last; do :; done
case "$1 $2" in
  "-m venv") mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; touch "$last/pyvenv.cfg" ;;
  "-m pytest") exit "${{PYTEST_STATUS:-0}}" ;;
  "-m pip") exit "${{PIP_STATUS:-0}}" ;;
esac
"""


class Machine:
    """A folder with a space in its name, a home, a PATH without any real Python."""

    def __init__(self, tmp):
        self.repo, self.home, self.path = tmp / "my checkout", tmp / "home", tmp / "bin"
        self.log = tmp / "log"
        (self.repo / "scripts").mkdir(parents=True)
        (self.repo / ".ci").mkdir()
        self.home.mkdir()
        self.path.mkdir()
        for name in ("Makefile", "pyproject.toml", "scripts/test_latest.sh", ".ci/run"):
            shutil.copy(ROOT / name, self.repo / name)
        for tool in ("bash", "sh", "make", "basename", "dirname", "cat", "cp", "mkdir", "touch"):
            if shutil.which(tool):
                (self.path / tool).symlink_to(shutil.which(tool))

    def shim(self, name):
        self._write(self.path / name, FAILING_SHIM.format(bash=BASH))

    def python(self, version, where=None):
        minor = ".".join(version.split(".")[:2])
        where = where or self.home / f".pyenv/versions/{version}/bin/python{minor}"
        old_enough = f"exit {int(int(minor.split('.')[1]) < 11)}"
        self._write(where, FAKE_PYTHON.format(
            bash=BASH, version=version, log=self.log, old_enough=old_enough
        ))
        return where

    def _write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def __call__(self, *command, **env):
        return subprocess.run(
            command, cwd=self.repo, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={"PATH": str(self.path), "HOME": str(self.home)} | env,
        )  # fmt: skip

    def latest(self, *args, **env):
        return self("bash", "scripts/test_latest.sh", *args, **env)

    def make(self, *args, **env):
        return self("make", *args, **env)

    def asked(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path):
    if BASH is None or shutil.which("make") is None:
        pytest.skip("needs bash and make")
    return Machine(tmp_path)


@pytest.mark.parametrize("shims", [(), ("python3.13", "python3.12", "python3")])
def test_without_an_interpreter_that_runs_the_skip_is_printed_and_passes(machine, shims):
    for name in shims:
        machine.shim(name)
    ran = machine.latest()
    assert ran.returncode == 0, ran.stderr
    assert "SKIPPED: no Python 3.13 or 3.12 that runs" in ran.stdout
    assert "FADEX_LATEST_PYTHON" in ran.stdout
    assert all(str(machine.path / s) in ran.stdout for s in shims if s != "python3")
    assert not (machine.repo / ".venv-latest").exists()


def test_the_skip_reaches_whoever_runs_make(machine):
    machine.shim("python3.13")
    ran = machine.make("test-latest")
    assert ran.returncode == 0 and "SKIPPED" in ran.stdout


def test_a_named_interpreter_comes_first_then_pyenv_then_path_newest_first(machine):
    named = machine.python("3.12.9", where=machine.home / "my python")
    on_path = machine.python("3.13.5", where=machine.path / "python3.13")
    old = machine.python("3.12.1")
    new = machine.python("3.13.0")
    order = [named, new, old, on_path]
    env = {"FADEX_LATEST_PYTHON": str(named)}
    for expected in order:
        ran = machine.latest("--which", **env)
        assert ran.returncode == 0 and f"({expected})" in ran.stdout.splitlines()[-1]
        expected.unlink()
    assert "SKIPPED" in machine.latest("--which", **env).stdout


def test_interpreters_that_exist_and_fail_or_are_too_old_are_passed_over(machine):
    machine.shim("python3.13")
    stale = machine.python("3.11.7", where=machine.home / ".pyenv/versions/3.13.1/bin/python3.13")
    good = machine.python("3.12.1", where=machine.path / "python3.12")
    ran = machine.latest("--which", FADEX_LATEST_PYTHON=str(stale))
    assert f"FADEX_LATEST_PYTHON={stale} does not run or is older than 3.12" in ran.stdout
    assert f"Python 3.12.1 ({good})" in ran.stdout


def test_the_smoke_tests_run_in_an_environment_that_is_made_once_and_kept_current(machine):
    machine.python("3.13.0")
    smoke = "3.13.0 -m pytest -m smoke -n 2 --dist loadfile"
    install = "3.13.0 -m pip install --quiet --disable-pip-version-check -e .[test]"
    assert machine.latest().returncode == 0
    assert machine.asked() == ["3.13.0 -m venv --clear .venv-latest", install, smoke]

    machine.log.unlink()
    assert machine.latest().returncode == 0
    assert machine.asked() == [smoke]

    machine.log.unlink()
    with (machine.repo / "pyproject.toml").open("a") as config:
        config.write("# a new dependency\n")
    assert machine.latest(PYTEST_STATUS="1").returncode == 1
    assert machine.asked() == [install, smoke]

    machine.log.unlink()
    machine.python("3.13.4")
    assert machine.latest().returncode == 0
    assert machine.asked()[0] == "3.13.4 -m venv --clear .venv-latest"


def test_a_failed_installation_fails_and_is_tried_again(machine):
    machine.python("3.13.0")
    for _ in range(2):
        assert machine.latest(PIP_STATUS="3").returncode != 0
    assert sum("pip install" in line for line in machine.asked()) == 2
    assert not any("pytest" in line for line in machine.asked())


def test_make_sets_up_with_the_first_python_that_runs_and_again_when_dependencies_change(machine):
    for name in ("python3.11", "python3.12"):
        machine.shim(name)
    machine.python("3.10.4", where=machine.path / "python3")
    machine.python("3.13.0", where=machine.home / ".pyenv/versions/3.13.0/bin/python3")
    fadex = machine.repo / ".venv/bin/fadex"
    machine._write(fadex, f'#!{BASH}\necho "demo $*" >>"{machine.log}"\n')
    install = "3.13.0 -m pip install --quiet --disable-pip-version-check -e .[demo]"
    demo = "demo demo --out out/demo"

    ran = machine.make("demo")
    assert ran.returncode == 0, ran.stderr
    assert machine.asked() == ["3.13.0 -m venv .venv", install, demo]

    machine.log.unlink()
    assert machine.make("demo").returncode == 0
    assert machine.asked() == [demo]

    machine.log.unlink()
    later = (machine.repo / ".venv/.demo-installed").stat().st_mtime + 5
    os.utime(machine.repo / "pyproject.toml", (later, later))
    assert machine.make("demo").returncode == 0
    assert machine.asked() == [install, demo]


def test_make_notices_a_copied_checkout_and_a_dead_interpreter(machine):
    machine.python("3.11.2", where=machine.path / "python3.11")
    target = ".venv/.demo-installed"
    assert machine.make(target).returncode == 0
    machine.repo = machine.repo.rename(machine.repo.with_name("moved"))
    machine.log.unlink()
    assert machine.make(target).returncode == 0
    (again,) = machine.asked()
    assert "pip install" in again

    machine.log.unlink()
    (machine.repo / ".venv/bin/python").unlink()
    assert machine.make(target).returncode == 0
    assert machine.asked()[0] == "3.11.2 -m venv --clear .venv"


def test_make_without_a_python_says_what_to_do(machine):
    for name in ("python3.11", "python3"):
        machine.shim(name)
    for args in ((), ("PYTHON=/no/such/python",)):
        ran = machine.make("demo", *args)
        assert ran.returncode != 0
        assert "found no Python 3.11 or newer that runs" in ran.stderr
        assert "make PYTHON=/path/to/python3 demo" in ran.stderr
        assert all(a in ran.stderr for a in args)


@pytest.mark.parametrize(
    ("latest", "suite"), [(0, 0), (1, 0), (0, 2), (1, 2)], ids=["pass", "latest", "suite", "both"]
)
def test_ci_runs_both_and_fails_when_either_does(machine, latest, suite):
    (machine.path / "make").unlink()
    machine._write(machine.path / "make", f"""#!{BASH}
echo "ran $1"
[[ $1 == test ]] && exit {suite}
exit {latest}
""")
    ran = machine(".ci/run", CI="true")
    assert (ran.returncode == 0) == (latest == suite == 0)
    assert ran.stdout.splitlines() == ["ran models", "ran test-latest", "ran test"]
    assert ("test-latest failed" in ran.stderr) == (latest == 1 and suite == 0)
