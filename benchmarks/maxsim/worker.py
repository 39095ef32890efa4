"""Runs maxsim-cpu in a process of its own, because its number of threads is settled by the
environment when it starts.

Its argument is a directory with ``query.npy`` float32 ``[Lq, d]``, ``tokens.npy`` float32 ``[n,
d]`` and ``lengths.npy``. It says ``ready``, then answers each line ``N`` on standard input with the
seconds that N calls took; N = 0 writes ``scores.npy``.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import numpy as np


def main(folder: Path) -> None:
    library = importlib.import_module("maxsim_cpu")
    query, tokens, lengths = (
        np.load(folder / f"{name}.npy") for name in ("query", "tokens", "lengths")
    )
    is_uniform = len(set(lengths.tolist())) == 1
    if is_uniform:
        # The form that its own benchmark is about: one array, no list.
        documents = tokens.reshape(len(lengths), -1, tokens.shape[1])
        score = library.maxsim_scores
    else:
        documents = np.split(tokens, np.cumsum(lengths)[:-1])
        score = library.maxsim_scores_variable
    score(query, documents)
    answer("ready")
    for line in sys.stdin:
        calls = int(line)
        begin = time.perf_counter()
        for _ in range(calls):
            score(query, documents)
        seconds = time.perf_counter() - begin
        if calls == 0:
            np.save(folder / "scores.npy", np.asarray(score(query, documents), dtype=np.float32))
        answer(repr(seconds))


def answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
