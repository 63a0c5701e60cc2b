#!/usr/bin/env bash
# The smoke tests on the newest other interpreter, in .venv-latest.
#
# Taken is the first of these that really runs and reports 3.12 or newer (pyenv's shims exist
# and fail, so a name alone proves nothing):
#   $FADEX_LATEST_PYTHON; python3.13, then python3.12, among pyenv's versions; the same on PATH.
# Where there is none this says so and passes. `--which` prints the choice and stops.
set -euo pipefail
cd -- "${BASH_SOURCE[0]%/*}/.."

venv=.venv-latest
say() { printf 'test-latest: %s\n' "$*"; }

# Prints X.Y.Z when the interpreter runs and will do; free-threaded builds lack wheels.
version_of() {
  local answer
  answer=$("$1" -c 'import sys, sysconfig
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null </dev/null) || return 1
  [[ $answer =~ ^3\.([0-9]+)\.[0-9]+$ ]] && ((BASH_REMATCH[1] >= 12)) || return 1
  printf '%s' "$answer"
}

shopt -s nullglob
versions=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
candidates=()
[[ -z ${FADEX_LATEST_PYTHON:-} ]] || candidates+=("$FADEX_LATEST_PYTHON")
for minor in 13 12; do
  found=("$versions"/3."$minor"*/bin/python3."$minor")
  for ((i = ${#found[@]} - 1; i >= 0; i--)); do candidates+=("${found[i]}"); done
done
for minor in 13 12; do
  if type -P python3."$minor" >/dev/null; then candidates+=("$(type -P python3."$minor")"); fi
done

python=
tried=
for candidate in ${candidates[@]+"${candidates[@]}"}; do
  if version=$(version_of "$candidate"); then
    python=$candidate
    break
  fi
  tried+="${tried:+, }$candidate"
done
if [[ -n ${FADEX_LATEST_PYTHON:-} && $python != "$FADEX_LATEST_PYTHON" ]]; then
  say "FADEX_LATEST_PYTHON=$FADEX_LATEST_PYTHON does not run or is older than 3.12"
fi
if [[ -z $python ]]; then
  say "SKIPPED: no Python 3.13 or 3.12 that runs, neither under $versions nor on PATH" \
    "(tried: ${tried:-none, there is no such name});" \
    "name one in FADEX_LATEST_PYTHON to run the smoke tests on it"
  exit 0
fi
say "Python $version ($python)"
[[ ${1:-} != --which ]] || exit 0

if [[ $(version_of "$venv/bin/python") != "$version" ]]; then
  "$python" -m venv --clear "$venv"
fi
stamp="$PWD
$(<pyproject.toml)"
if [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$stamp" ]]; then
  say "installing what the tests need (the first time takes minutes)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[test]'
  printf '%s\n' "$stamp" >"$venv/.installed"
fi
exec "$venv/bin/python" -m pytest -m smoke -n "${WORKERS:-2}" --dist loadfile
