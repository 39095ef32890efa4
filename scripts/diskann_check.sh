#!/usr/bin/env bash
# Graphs beside DiskANN: an index that espnx exports is searched by diskannpy 0.7, and one that
# diskannpy builds is imported and searched here. Prints what each found beside an exact search;
# exit status 1 where an index loses more than it may.
#
#   scripts/diskann_check.sh
#
#   PYTHON311=python3.11   which Python 3.11: diskannpy 0.7.0 has wheels for none newer
#
# diskannpy pins numpy 1.25: it gets an environment of its own, .cache/diskannpy, once (100 MB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ENVIRONMENT=.cache/diskannpy
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

if [ ! -e "$ENVIRONMENT/ready" ]; then
  rm -rf "$ENVIRONMENT"
  mkdir -p .cache
  "${PYTHON311:-python3.11}" -m venv "$ENVIRONMENT"
  "$ENVIRONMENT/bin/python" -m pip install --quiet --progress-bar off diskannpy==0.7.0
  touch "$ENVIRONMENT/ready"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python scripts/diskann_check.py "$work" "$ENVIRONMENT/bin/python"
