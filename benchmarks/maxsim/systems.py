"""Systems of the MaxSim benchmark: espnx's op on records in place, and what others do with the same
tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from espnx.errors import MissingDependencyError
from espnx.ops import maxsim, maxsim_reference
from espnx.ops.maxsim import Codebook, token_format

from ..harness.runner import Sample

CENTROIDS = 1024
CODEBOOK_SAMPLE = 20_000
UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Corpus:
    """What is scored.

    Attributes:
        query: float32 ``[Lq, d]``, rows of length 1.
        tokens: float32 ``[total, d]``, rows of length 1, document after document.
        lengths: int64 ``[n]``.
        threads: that every system may use.
        calls: of a run, whose time is the mean of them.
    """

    query: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    threads: int
    calls: int

    @classmethod
    def random(
        cls, d: int, lengths: torch.Tensor, n_query_tokens: int, threads: int, calls: int, seed: int
    ) -> Corpus:
        generator = torch.Generator().manual_seed(seed)
        total = int(lengths.sum())
        tokens, query = (
            torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=1)
            for n in (total, n_query_tokens)
        )
        return cls(query, tokens, lengths, threads, calls)

    @property
    def fp32_bytes(self) -> int:
        """Bytes of the tokens in fp32. Every system is asked for as much, so that times per byte
        compare as times do."""
        return self.tokens.numel() * 4

    def reference(self) -> torch.Tensor:
        """float32 ``[n]``: scores of the tokens as they are."""
        begins = (self.lengths.cumsum(0) - self.lengths) * self.tokens.shape[1] * 4
        return maxsim_reference(
            self.query, self.tokens.view(torch.uint8).view(-1), begins, self.lengths, "fp32"
        )

    def rounding(self) -> float:
        """How far two fp32 versions may differ on rows of length 1 (docs/tolerances.md)."""
        roundings = 2 * self.tokens.shape[1] + len(self.query) + 4
        return 2 * roundings * UNIT_ROUNDOFF * len(self.query)


class CallSystem:
    """A system that is a function of nothing; a run calls it some times."""

    requested_path = effective_path = "memory"

    def __init__(
        self,
        name: str,
        group: str,
        corpus: Corpus,
        call: Callable[[], torch.Tensor],
        *,
        bytes_moved: int,
        tolerance: float,
    ):
        self.name, self.group, self.corpus, self.call = name, group, corpus, call
        self.bytes_moved, self.tolerance = bytes_moved, tolerance

    def expected(self) -> torch.Tensor:
        return self.corpus.reference()

    def verify(self) -> str | None:
        return difference(self.call(), self.expected(), self.tolerance)

    def prepare(self, turn: int) -> str:
        self.call()
        return "warm"

    def run(self) -> Sample:
        with torch_threads(self.corpus.threads):
            begin = time.perf_counter()
            for _ in range(self.corpus.calls):
                self.call()
            seconds = (time.perf_counter() - begin) / self.corpus.calls
        return sample(self.corpus, seconds, self.bytes_moved)

    def close(self) -> None:
        pass


class EspnxSystem(CallSystem):
    """The op, on records in random order in one buffer, as reads leave them."""

    def __init__(self, fmt: str, corpus: Corpus, seed: int):
        self.format, token, d = fmt, token_format(fmt), corpus.tokens.shape[1]
        self.codebook = None
        if token.needs_codebook:
            sample_rows = corpus.tokens[:CODEBOOK_SAMPLE]
            self.codebook = Codebook.fit(
                sample_rows,
                int(fmt.removeprefix("residual")),
                min(CENTROIDS, len(sample_rows)),
                seed,
            )
        n, row_bytes = len(corpus.lengths), token.token_row_bytes(d)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        self.buffer = torch.cat(
            [token.encode(part, self.codebook) for part in _in_order(corpus, order)]
        )
        placed = corpus.lengths[order]
        self.offset_bytes = torch.empty(n, dtype=torch.int64)
        self.offset_bytes[order] = (placed.cumsum(0) - placed) * row_bytes
        coded = (
            corpus.query.abs().amax(dim=1).sum().item() * d**0.5 / 64000
            if fmt in ("int8", "bit1")
            else 0.0
        )
        super().__init__(
            f"espnx-{fmt}",
            f"espnx-{fmt}",
            corpus,
            self._score,
            bytes_moved=self.buffer.numel(),
            tolerance=corpus.rounding() + coded,
        )

    def _score(self) -> torch.Tensor:
        c = self.corpus
        return maxsim(
            c.query,
            self.buffer,
            self.offset_bytes,
            c.lengths,
            self.format,
            threads=c.threads,
            codebook=self.codebook,
        )

    def expected(self) -> torch.Tensor:
        """The scores of the stored values: what a format loses is another matter than whether its
        kernel is right."""
        return maxsim_reference(
            self.corpus.query,
            self.buffer,
            self.offset_bytes,
            self.corpus.lengths,
            self.format,
            codebook=self.codebook,
        )


def _in_order(corpus: Corpus, order: torch.Tensor) -> list[torch.Tensor]:
    parts = corpus.tokens.split(corpus.lengths.tolist())
    return [parts[i] for i in order.tolist()]


def torch_systems(name: str, corpus: Corpus) -> list[CallSystem]:
    """A baseline in torch, with its variants: ``torch-segment``, ``torch-padded`` or
    ``torch-bf16``. Decoding to its dtype is not timed."""
    query, lengths, tolerance = corpus.query, corpus.lengths, corpus.rounding()
    if name == "torch-segment":
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

        def segment() -> torch.Tensor:
            products = corpus.tokens @ query.T
            return torch.segment_reduce(products, "max", offsets=bounds, axis=0, unsafe=True).sum(
                dim=1
            )

        return [
            CallSystem(
                name, name, corpus, segment, bytes_moved=corpus.fp32_bytes, tolerance=tolerance
            )
        ]
    dtype = torch.bfloat16 if name == "torch-bf16" else torch.float32
    padded = torch.nn.utils.rnn.pad_sequence(
        corpus.tokens.split(lengths.tolist()), batch_first=True
    ).to(dtype)
    padding = torch.arange(padded.shape[1]) >= lengths[:, None]
    has_padding, narrow = bool(padding.any()), query.to(dtype)
    if dtype == torch.bfloat16:
        tolerance = 3 * 2.0**-8 * len(query)  # both factors and the product are rounded to 8 bits

    def tokens_first() -> torch.Tensor:
        products = padded @ narrow.T
        if has_padding:
            products = products.masked_fill(padding[:, :, None], -torch.inf)
        return products.amax(dim=1).float().sum(dim=1)

    def query_first() -> torch.Tensor:
        products = narrow @ padded.transpose(1, 2)
        if has_padding:
            products = products.masked_fill(padding[:, None, :], -torch.inf)
        return products.amax(dim=2).float().sum(dim=1)

    size_bytes = padded.numel() * padded.element_size()
    calls = {"tokens-first": tokens_first, "query-first": query_first}
    return [
        CallSystem(
            f"{name}-{variant}", name, corpus, call, bytes_moved=size_bytes, tolerance=tolerance
        )
        for variant, call in calls.items()
    ]


class MaxsimCpuSystem:
    """maxsim-cpu in a process with the wanted number of threads."""

    name = group = "maxsim-cpu"
    requested_path = effective_path = "memory"

    def __init__(self, corpus: Corpus):
        require_maxsim_cpu()
        self.corpus = corpus
        self._folder = tempfile.TemporaryDirectory(prefix="espnx-bench-")
        for name, tensor in (
            ("query", corpus.query),
            ("tokens", corpus.tokens),
            ("lengths", corpus.lengths),
        ):
            np.save(Path(self._folder.name, f"{name}.npy"), tensor.numpy())
        threads = str(corpus.threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "espnx.benchmarks.maxsim.worker", self._folder.name],
            env={
                **os.environ,
                "RAYON_NUM_THREADS": threads,
                "OMP_NUM_THREADS": threads,
                "OMP_WAIT_POLICY": "passive",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def verify(self) -> str | None:
        self._ask(0)
        scores = torch.from_numpy(np.load(Path(self._folder.name, "scores.npy")))
        return difference(scores, self.corpus.reference(), self.corpus.rounding())

    def prepare(self, turn: int) -> str:
        self._ask(1)
        return "warm"

    def run(self) -> Sample:
        return sample(
            self.corpus, self._ask(self.corpus.calls) / self.corpus.calls, self.corpus.fp32_bytes
        )

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait(timeout=60)
        self._pipe(self._process.stdout).close()
        self._folder.cleanup()

    def _ask(self, calls: int) -> float:
        pipe = self._pipe(self._process.stdin)
        pipe.write(f"{calls}\n")
        pipe.flush()
        return float(self._answer())

    def _answer(self) -> str:
        line = self._pipe(self._process.stdout).readline().strip()
        if not line:
            raise MissingDependencyError(
                "maxsim-cpu cannot run", got=f"its process ended with {self._process.wait()}"
            )
        return line

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise MissingDependencyError("maxsim-cpu cannot run", got="a process without pipes")
        return pipe


def require_maxsim_cpu() -> None:
    """Raises MissingDependencyError where the package is not installed."""
    if find_spec("maxsim_cpu") is None:
        raise MissingDependencyError(
            "the baseline maxsim-cpu is not installed",
            fix="pip install maxsim-cpu, or leave it out of --baseline",
        )


def difference(scores: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """What is wrong with scores, or None."""
    if scores.shape != expected.shape:
        return f"{list(scores.shape)} scores instead of {list(expected.shape)}"
    wrong = ~((scores - expected).abs() <= tolerance)  # a NaN is wrong too
    if not bool(wrong.any()):
        return None
    i = int(wrong.nonzero()[0])
    return (
        f"document {i} scores {float(scores[i])} instead of {float(expected[i])}, tolerance "
        f"{tolerance:.2g}"
    )


def sample(corpus: Corpus, seconds: float, bytes_moved: int) -> Sample:
    n = len(corpus.lengths)
    return Sample(
        seconds,
        corpus.fp32_bytes,
        bytes_moved,
        {"documents_per_s": n / seconds, "bytes_per_document": bytes_moved / n},
    )


class torch_threads(AbstractContextManager[None]):  # noqa: N801
    """torch's own number of threads within a block."""

    def __init__(self, threads: int):
        self.threads = threads

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        if self.before != self.threads:
            torch.set_num_threads(self.threads)

    def __exit__(self, *details: Any) -> None:
        if self.before != self.threads:
            torch.set_num_threads(self.before)
