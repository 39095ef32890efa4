#!/usr/bin/env bash
# Everything that needs a CUDA machine, in one command: builds the extension in place against the
# Python at hand (no network), runs the GPU tests, reads into GPU memory, checks and times the
# kernels, searches and generates end to end, and writes one JSON file.
#
#   bash scripts/gpu_check.sh [--out FILE.json] [--work DIR]
#
#   PYTHON=python3.12   which Python; without it .venv's, if its torch sees the GPU, else python3
#
# Exit status: 0 all checks passed, 1 one failed, 3 no GPU.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly BUILD_LIMIT_S=150
readonly SEES_GPU='
import sys, warnings, torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    sees = torch.cuda.is_available()
if not sees:
    why = " ".join(str(each.message).splitlines()[0] for each in said)
    print(why or (f"torch {torch.__version__}" + ("" if torch.version.cuda else " is built without CUDA")))
sys.exit(0 if sees else 1)'

candidates=(.venv/bin/python python3)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
python="" why=""
for candidate in "${candidates[@]}"; do
  command -v "$candidate" >/dev/null || continue
  if said=$("$candidate" -c "$SEES_GPU" 2>&1); then
    python=$candidate
    break
  fi
  why="$why ($candidate: $(printf '%s\n' "$said" | tail -n 1))"
done
if [ -z "$python" ]; then
  echo "gpu_check: no GPU: no Python here (${PYTHON:-.venv/bin/python, python3}) has a torch that sees a CUDA device.$why" >&2
  exit 3
fi
echo "gpu_check: building the extension for $("$python" -V 2>&1), torch $("$python" -c 'import torch; print(torch.__version__)')" >&2
started=$SECONDS
if ! build=$(MAX_JOBS=${MAX_JOBS:-8} timeout "$BUILD_LIMIT_S" "$python" setup.py -q build_ext --inplace 2>&1); then
  printf '%s\n' "$build" | tail -n 30 >&2
  echo "gpu_check: the extension did not build; the checks that need it will fail" >&2
else
  # kernels of csrc/cuda that do not compile are left out
  printf '%s\n' "$build" | grep '^warning: ' >&2 || true
fi
export ESPNX_CALLED_FROM=$called_from ESPNX_BUILD_S=$((SECONDS - started))
exec "$python" scripts/gpu_check.py "$@"
