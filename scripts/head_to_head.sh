#!/usr/bin/env bash
# espnx beside other programs, on the same corpus, or with the same model and prompt:
# docs/measured/head-to-head.md shows what came out.
#
#   scripts/head_to_head.sh search [--collection DIR] [OPTIONS]
#       fast-plaid, PyLate's PLAID; DIR: a labelled collection, as BEIR has them
#   scripts/head_to_head.sh kv [OPTIONS]
#       caches of transformers, accelerate's offload of weights, llama.cpp
#   scripts/head_to_head.sh search|kv --prepare
#       makes the environments alone, and measures nothing
#
# Makes an environment for each of them in .cache/head-to-head, once (7 GB for search, as
# fast-plaid's torch brings CUDA; 2 GB for kv; a C++ compiler and a quarter of an hour for llama.cpp
# where there is no wheel), then runs `espnx bench head-to-head`, which names its OPTIONS (--help),
# and writes benchmarks/results/head-to-head-JOB.json. What could not be installed says so in its
# row.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ENVIRONMENTS=.cache/head-to-head
readonly PYTHON=$PWD/.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'head-to-head: %s\n' "$*" >&2; }

# environment NAME COMMAND: a venv in which COMMAND installs; kept only where it succeeds.
environment() {
  local to=$ENVIRONMENTS/$1 log=$ENVIRONMENTS/$1.log
  [ -e "$to/ready" ] && return
  say "$1 is installed (log: $log)"
  rm -rf "$to"
  "$PYTHON" -m venv "$to"
  if "$2" "$to" >"$log" 2>&1; then touch "$to/ready"; else say "$1 could not be installed: $(tail -n 1 "$log")"; rm -rf "$to"; fi
}

install() { "$1/bin/python" -m pip install --progress-bar off "${@:2}"; }

pylate() { install "$1" pylate==1.6.0; }

# PyLate pins an older one. This one is put before it, with the same torch, which both pin; numkong
# is what usearch asks for.
fast_plaid() {
  [ -e "$ENVIRONMENTS/pylate/ready" ] || { echo "it takes torch from the environment of PyLate, which is not there"; return 1; }
  install "$1" --no-deps fast-plaid==1.7.0.2110 usearch==2.26.6 numkong==7.8.6 || return
  ls -d "$PWD/$ENVIRONMENTS"/pylate/lib/python*/site-packages >"$(ls -d "$1"/lib/python*/site-packages)/pylate.pth"
}

kv() { install "$1" -c constraints.txt torch transformers accelerate gguf optimum-quanto==0.2.7 hqq==0.2.8.post1; }

llama_cpp() {
  install "$1" --only-binary :all: llama-cpp-python==0.3.36 || CMAKE_ARGS=-DGGML_NATIVE=ON install "$1" llama-cpp-python==0.3.36
}

main() {
  local job=${1:-}
  mkdir -p "$ENVIRONMENTS"
  case $job in
    search) environment pylate pylate && environment fast-plaid fast_plaid ;;
    kv) environment kv kv && environment llama-cpp llama_cpp ;;
    *) sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; [ "$job" = --help ]; return ;;
  esac
  if [ "${2:-}" = --prepare ]; then
    local ready=("$ENVIRONMENTS"/*/ready)
    ready=("${ready[@]%/ready}")
    say "ready: ${ready[*]##*/}"
    return
  fi
  "$PYTHON" -m espnx bench head-to-head "$job" --environments "$ENVIRONMENTS" --json "benchmarks/results/head-to-head-$job.json" "${@:2}"
}

main "$@"
