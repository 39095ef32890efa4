#!/usr/bin/env bash
# Two commits side by side: each in a worktree with an extension of its own, run in turn, in
# shuffled order, compared pair by pair.
#
#   scripts/compare_commits.sh [OPTIONS] A B CASE [ARGS...]
#       a case of `espnx bench`, with its arguments
#   scripts/compare_commits.sh [OPTIONS] A B -- COMMAND...
#       any command, by its time; it runs in the worktree's root
#   scripts/compare_commits.sh [OPTIONS] A B --worker FILE [ARGS...]
#       a Python file that opens what it needs once for all turns, and then for each line on its
#       standard input does the turn of that number and writes one line of JSON:
#       {"seconds": {POINT: SECONDS, ...}, "results": what has to be the same on every side}.
#       scripts/compare_searches.py is one.
#
#   --pairs N        how often each side runs (default: 30)
#   --processes N    workers are started anew so often, each for as many pairs, and the interval is
#                    of such processes: two of one commit differ by where their memory happens to lie
#   --own-spread     A runs twice in every turn, in two worktrees: what two equal commits differ by,
#                    beside what A and B do
#   --bar R          end with 1 if at some point the whole interval lies above R
#   --a WORDS, --b WORDS
#                    more words for one side alone, where an option changed its name; the commits
#                    share their folders otherwise
#   --seed N         of the order and of the bootstrap (default: 1)
#   --json FILE      also write every time and every ratio
#
# For example:
#
#   scripts/compare_commits.sh --own-spread HEAD~20 HEAD kv --path /mnt/nvme --context 3840
#
# Works from the clone alone, with its .venv; nothing is fetched, and what was made for the
# comparison is removed at the end, except for compiled extensions, which .cache/compare keeps by
# their sources.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ROOT=$PWD KEPT=$PWD/.cache/compare
readonly PYTHON=$ROOT/.venv/bin/python

say() { printf 'compare: %s\n' "$*" >&2; }
die() { printf 'compare: error: %s\n' "$*" >&2; exit 2; }

options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --own-spread) options+=("$1"); shift ;;
    --pairs | --processes | --bar | --a | --b | --seed | --json) [ $# -ge 2 ] || die "$1 needs a value"; options+=("$1=$2"); shift 2 ;;
    --worker) break ;;
    --*) die "unknown option $1 (--help lists them)" ;;
    *) break ;;
  esac
done
[ $# -ge 3 ] || die "expected A B CASE [ARGS...], A B -- COMMAND... or A B --worker FILE [ARGS...] (--help)"
[ -x "$PYTHON" ] || die "no .venv here; run \`make setup\`"
a=$(git rev-parse --verify --quiet "$1^{commit}") || die "no commit $1"
b=$(git rev-parse --verify --quiet "$2^{commit}") || die "no commit $2"
shift 2

mkdir -p "$KEPT"
work=$(mktemp -d "$KEPT/run-XXXXXX")
cleanup() {
  local side
  for side in "$work"/*/; do git worktree remove --force "$side" 2>/dev/null || true; done
  rm -rf "$work"
  git worktree prune
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# True when the extension in this folder is that of the commit: the same sources, and no source
# newer than it.
fits_here() {
  git diff --quiet "$1" -- csrc setup.py && compgen -G 'espnx/_C*.so' >/dev/null &&
    [ -z "$(find csrc setup.py -type f -newer "$(compgen -G 'espnx/_C*.so')" -print -quit)" ]
}

# extension COMMIT FOLDER: puts the commit's extension into its worktree.
extension() {
  local abi key
  if fits_here "$1"; then
    cp -p espnx/_C*.so "$2/espnx/"
    return
  fi
  abi=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  abi+=$("$PYTHON" -c 'from importlib import metadata; print(metadata.version("torch"))')
  key=$({ git rev-parse "$1:csrc" "$1:setup.py"; echo "$abi"; } | sha256sum | cut -c 1-24)
  if [ ! -d "$KEPT/$key" ]; then
    say "compiling the extension of ${1:0:9} (a few minutes)"
    (
      cd "$2"
      [ ! -d /usr/lib/ccache ] || export PATH="/usr/lib/ccache:$PATH" CCACHE_BASEDIR="$2" CCACHE_NOHASHDIR=1
      PATH="$ROOT/.venv/bin:$PATH" MAX_JOBS=${MAX_JOBS:-2} "$PYTHON" setup.py -q build_ext --inplace
    ) >"$work/log" 2>&1 || { tail -n 25 "$work/log" >&2; die "the extension of $1 did not compile"; }
    rm -rf "$2/build"
    mkdir "$work/kept" && cp "$2"/espnx/_C*.so "$work/kept/" && mv "$work/kept" "$KEPT/$key"
  fi
  cp "$KEPT/$key"/_C*.so "$2/espnx/"
}

# Names of one length: no side has the longer path.
side() {
  git worktree add --quiet --detach "$work/$1" "$2"
  extension "$2" "$work/$1"
  # An editable install of this clone must not be what both sides run.
  (cd "$work/$1" && PYTHONPATH=$PWD "$PYTHON" -c 'import os, espnx; assert espnx.__file__.startswith(os.getcwd()), espnx.__file__') ||
    die "espnx is not imported from the worktree of $2"
}
side a "$a"
side b "$b"
case " ${options[*]-} " in *" --own-spread "*) side s "$a" ;; esac

say "A is $(git log -1 --format='%h %s' "$a")"
say "B is $(git log -1 --format='%h %s' "$b")"
# Not exec: the worktrees are removed afterwards.
"$PYTHON" scripts/compare_commits.py "$work" "$a" "$b" ${options[@]+"${options[@]}"} -- "$@"
