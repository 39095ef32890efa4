"""The turns and the numbers of compare_commits.sh, which has made the worktrees: who runs when, and
what the paired ratios come to.

A disk and a shared machine drift by more than two commits differ. So both sides run in every turn,
in shuffled order, and only ratios within a turn are compared: their geometric mean, and the
interval that 95 % of such means of as many turns drawn anew lie in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
Times = dict[str, float]  # point -> seconds


class Comparison(NamedTuple):
    """B over A at one point: above 1, B is slower."""

    ratio: float
    low: float
    high: float


def compare(
    a_s: Sequence[float], b_s: Sequence[float], seed: int, processes: int | None = None
) -> Comparison:
    """The geometric mean of the paired ratios, with its 95 % bootstrap interval.

    Args:
        processes: that made the pairs, each as many, one after the other: what is drawn anew are
            processes then, as two of one program differ by where their memory happens to lie. None:
            pairs are drawn.
    """
    logs = np.log(np.asarray(b_s, dtype=np.float64) / np.asarray(a_s, dtype=np.float64))
    if processes is not None:
        logs = logs.reshape(processes, -1).mean(axis=1)
    drawn = np.random.default_rng(seed).integers(0, len(logs), (RESAMPLES, len(logs)))
    low, high = np.percentile(logs[drawn].mean(axis=1), [2.5, 97.5])
    return Comparison(*(float(np.exp(value)) for value in (logs.mean(), low, high)))


def points(rows: Sequence[Mapping[str, Any]], shared: set[str]) -> Times:
    """The median time of each row, by its system and those of its parameters that every side knows.

    Raises:
        ValueError: a wrong result, or one without a time.
    """
    found: Times = {}
    seen = Counter[str]()
    for row in rows:
        words = [
            f"{key}={value}"
            for key, value in sorted(row["params"].items())
            if key in shared and value is not None
        ]
        name = " ".join([row["system"], *words])
        seen[name] += 1
        name += f" #{seen[name]}" if seen[name] > 1 else ""
        if not row["correct"] or row["median_s"] is None:
            raise ValueError(f"wrong or without a time: {name}")
        found[name] = row["median_s"]
    return found


def shared_keys(documents: Sequence[Sequence[Mapping[str, Any]]]) -> set[str]:
    """The names of parameters that every side's rows have."""
    return set.intersection(*({key for row in rows for key in row["params"]} for rows in documents))


def environment(folder: Path) -> dict[str, str]:
    """The environment in which a worktree's own code runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


class Worker:
    """A program in a worktree that stays for all turns."""

    def __init__(self, folder: Path, command: Sequence[str]):
        self._name = folder.name
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def turn(self, number: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{number}\n")
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            raise SystemExit(
                f"compare: error: the worker of {self._name} gave no answer in turn {number}: "
                f"{error}"
            ) from error
        return answer

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes
            pass


class Side(NamedTuple):
    """A worktree and what runs in it."""

    folder: Path
    command: list[str]
    is_case: bool

    def run(self) -> Any:
        """Rows of a case, or the seconds of a command. What it prints goes to standard error where
        it fails."""
        result = self.folder / ".cache" / "compare.json"
        result.parent.mkdir(exist_ok=True)
        result.unlink(missing_ok=True)
        words = [*self.command, "--json", str(result)] if self.is_case else self.command
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                words,
                cwd=self.folder,
                env=environment(self.folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as error:
            raise SystemExit(
                f"compare: error: {words[0]} does not run: {error.strerror}"
            ) from error
        seconds = time.perf_counter() - begin
        if done.returncode != 0 or (self.is_case and not result.exists()):
            raise SystemExit(
                f"compare: error: exit code {done.returncode} in {self.folder.name}\n"
                f"{done.stdout[-4000:]}"
            )
        return json.loads(result.read_text())["rows"] if self.is_case else seconds


def measure(sides: Mapping[str, Side], pairs: int, order: random.Random) -> dict[str, list[Times]]:
    """Each side's times, turn by turn. A first turn is not counted: it fills caches and makes
    data."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(-1, pairs):
        names = list(sides)
        order.shuffle(names)
        for name in names:
            result = sides[name].run()
            if turn >= 0:
                found[name].append(result)
        print(f"compare: {turn + 1} of {pairs} pairs", file=sys.stderr, flush=True)
    if not next(iter(sides.values())).is_case:
        return {name: [{"command": seconds} for seconds in runs] for name, runs in found.items()}
    shared = shared_keys([runs[0] for runs in found.values()])
    try:
        return {name: [points(rows, shared) for rows in runs] for name, runs in found.items()}
    except ValueError as error:
        raise SystemExit(f"compare: error: {error}") from error


def measure_workers(
    folders: Mapping[str, Path],
    command: Sequence[str],
    pairs: int,
    order: random.Random,
    processes: int = 1,
) -> dict[str, list[Times]]:
    """Measures programs that stay, as `measure` does, started anew for every part of the pairs.
    Raises SystemExit where they find different results in a turn."""
    found: dict[str, list[Times]] = {name: [] for name in folders}
    for first in range(0, pairs, pairs // processes):
        turns = range(first - 1, first + pairs // processes)
        _measure_started(folders, command, turns, pairs, order, found)
    return found


def _measure_started(
    folders: Mapping[str, Path],
    command: Sequence[str],
    turns: range,
    pairs: int,
    order: random.Random,
    found: dict[str, list[Times]],
) -> None:
    """Adds what workers that are started now find; the first turn is not counted."""
    starting = list(folders)
    order.shuffle(starting)
    workers = {name: Worker(folders[name], command) for name in starting}
    try:
        for turn in turns:
            names = list(workers)
            order.shuffle(names)
            answers = {name: workers[name].turn(turn + 1) for name in names}
            if (
                len(
                    {
                        json.dumps(answer.get("results"), sort_keys=True)
                        for answer in answers.values()
                    }
                )
                > 1
            ):
                raise SystemExit(
                    f"compare: error: the commits find different results in turn {turn + 1}"
                )
            for name, answer in answers.items() if turn != turns[0] else ():
                found[name].append(
                    {point: float(seconds) for point, seconds in answer["seconds"].items()}
                )
            print(f"compare: {turn + 1} of {pairs} pairs", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.end()


def summary(
    times: Mapping[str, list[Times]], seed: int, processes: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """One entry for each point that every turn of every side has, and the points that some lack."""
    every = [set(turn) for runs in times.values() for turn in runs]
    common = set.intersection(*every)
    entries = []
    for point in [point for point in times["a"][0] if point in common]:
        of = {name: [turn[point] for turn in runs] for name, runs in times.items()}
        entry = {
            "point": point,
            **{f"{name}_s": seconds for name, seconds in of.items()},
            **compare(of["a"], of["b"], seed, processes)._asdict(),
        }
        if "s" in of:
            entry["own_spread"] = compare(of["a"], of["s"], seed, processes)._asdict()
        entries.append(entry)
    return entries, sorted(set.union(*every) - common)


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    def between(found: Mapping[str, float]) -> str:
        return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"

    lines = [("A median", "B median", "B over A [95 %]", "A over A [95 %]", "point")]
    for entry in entries:
        medians = [f"{1e3 * statistics.median(entry[key]):.3f} ms" for key in ("a_s", "b_s")]
        lines.append(
            (
                *medians,
                between(entry),
                between(entry["own_spread"]) if "own_spread" in entry else "-",
                entry["point"],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[4]]
        )
        for line in lines
    )


def main(argv: Sequence[str]) -> int:
    split = argv.index("--")
    parser = argparse.ArgumentParser(prog="compare_commits.py")
    for name in ("work", "commit_a", "commit_b"):
        parser.add_argument(name)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--own-spread", action="store_true")
    parser.add_argument("--bar", type=float)
    parser.add_argument("--a", default="")
    parser.add_argument("--b", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args, words = parser.parse_args(argv[:split]), list(argv[split + 1 :])
    if args.pairs < 2:
        parser.error("--pairs: at least 2")
    if args.processes is not None and (words[0] != "--worker" or args.processes < 2):
        parser.error("--processes: at least 2, of a --worker")
    if args.processes is not None and args.pairs % args.processes:
        parser.error("--pairs: a multiple of --processes")
    names = ["a", "b", "s"] if args.own_spread else ["a", "b"]
    order = random.Random(args.seed)
    if words[0] == "--worker":
        if args.a or args.b:
            parser.error("--a, --b: a worker is called alike on every side")
        command = [sys.executable, str(Path(words[1]).resolve()), *words[2:]]
        folders = {name: Path(args.work) / name for name in names}
        times = measure_workers(folders, command, args.pairs, order, args.processes or 1)
    else:
        times = measure(sides_of(args, words, names), args.pairs, order)
    return report(args, words, *summary(times, args.seed, args.processes))


def sides_of(
    args: argparse.Namespace, words: Sequence[str], names: Sequence[str]
) -> dict[str, Side]:
    is_case = words[0] != "--"
    command = [sys.executable, "-m", "espnx", "bench", *words] if is_case else list(words[1:])
    if is_case and "--pairs" not in words:
        command += ["--pairs", "1"]
    more = {"a": shlex.split(args.a), "b": shlex.split(args.b), "s": shlex.split(args.a)}
    return {name: Side(Path(args.work) / name, command + more[name], is_case) for name in names}


def report(
    args: argparse.Namespace,
    words: Sequence[str],
    entries: Sequence[Mapping[str, Any]],
    missing: Sequence[str],
) -> int:
    """Prints the table, writes the file, and returns the exit code."""
    for point in missing:
        print(f"compare: not on both sides: {point}", file=sys.stderr)
    if not entries:
        raise SystemExit("compare: error: the commits have no point in common")
    overall = float(np.exp(np.mean([np.log(entry["ratio"]) for entry in entries])))
    print(table(entries))
    started = "" if args.processes is None else f" of {args.processes} processes"
    print(f"{len(entries)} points, {args.pairs} pairs{started}: B over A {overall:.3f}")
    if args.json:
        commits = {"a": args.commit_a, "b": args.commit_b}
        document = {
            "commits": commits,
            "words": words,
            "pairs": args.pairs,
            "processes": args.processes,
            "ratio": overall,
            "points": entries,
            "missing": missing,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    slower = [
        entry["point"] for entry in entries if args.bar is not None and entry["low"] > args.bar
    ]
    for point in slower:
        print(f"above {args.bar}: {point}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
