"""What holds for every device that scores embedding records: scores in float64, within the bounds
of docs/tolerances.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from ... import errors
from ...storage import Engine, FaultyEngine, NativeEngine
from ..interface import KeptRecords, Pairs, RecordQuery
from ..near_storage import NearStorageDevice
from ..record_layout import HEADER_BYTES, RecordLayout, RecordSchema, seal
from .faults import fault_checks
from .requirement import in_threads, raises, require

_CPU, _RECORDS, _SALT = torch.device("cpu"), 150, 7
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
U = 2.0**-24  # unit roundoff of fp32


class _Known:
    """Records on a device, and what is in them as float64."""

    def __init__(self, schema: RecordSchema, path: str):
        rng = torch.Generator().manual_seed(schema.dim)
        n_tokens = torch.randint(0, 30, (_RECORDS,), generator=rng).numpy().astype(np.uint16)
        n_tokens[:3] = 0, 1, 300
        offsets, end = schema.lay_out(n_tokens, 0)
        memory, dtype = np.zeros(end, np.uint8), _DTYPES[schema.format]
        self.cls, self.tokens = list[torch.Tensor](), list[torch.Tensor]()
        for at, count in zip(offsets.tolist(), n_tokens.tolist(), strict=True):
            for width, n, begin, kept in (
                (schema.d_cls, 1, at + HEADER_BYTES, self.cls),
                (schema.dim, count, at + schema.fixed_bytes, self.tokens),
            ):
                values = torch.randn(n, width, generator=rng).to(dtype)
                data = values.view(torch.uint8).reshape(-1).numpy()
                memory[begin : begin + len(data)] = data
                kept.append(values.double())
        seal(memory, schema, offsets, n_tokens, 0, _SALT)
        memory.tofile(path)
        self.schema, self.n_tokens, self.groups = (
            schema,
            n_tokens,
            torch.from_numpy(offsets[::64].copy()),
        )

    def layout(self, file: object) -> RecordLayout:
        files = [file]
        return RecordLayout(
            self.schema,
            self.n_tokens,
            self.groups,
            torch.tensor([0]),
            files,  # type: ignore[arg-type]
            salt=_SALT,
        )

    def query(self, seed: int) -> RecordQuery:
        rng = torch.Generator().manual_seed(seed)
        cls, tokens = (
            torch.randn(1, self.schema.d_cls, generator=rng),
            torch.randn(1 + seed % 32, self.schema.dim, generator=rng),
        )
        return RecordQuery(cls, tokens, (0.0, 0.5, 2.0)[seed % 3])

    def require_right(
        self, scores: np.ndarray, numbers: np.ndarray, query: RecordQuery, what: str
    ) -> None:
        require(
            scores.shape == numbers.shape,
            f"{what}: scores",
            got=scores.shape,
            expected=numbers.shape,
        )
        for found, number in zip(scores.tolist(), numbers.tolist(), strict=True):
            wanted, bound = self._score(number, query)
            require(
                abs(found - wanted) <= bound,
                f"{what}: score of record {number}",
                got=found,
                expected=f"{wanted} +- {bound:.2g}",
            )

    def _score(self, number: int, query: RecordQuery) -> tuple[float, float]:
        """(exact, how far fp32 and bf16 in parts may be off)."""
        parts = [
            (query.tokens.double(), self.tokens[number], 1.0),
            (query.cls.double(), self.cls[number], query.cls_weight),
        ]
        total = bound = 0.0
        for q, rows, weight in parts:
            if len(rows) and weight:
                n = q.shape[1] + len(q)
                size = float((q.abs() @ rows.abs().T).amax(dim=1).sum()) * weight
                total += weight * float((q @ rows.T).amax(dim=1).sum())
                bound += size * (_gamma(n) + _gamma(2.1 * q.shape[1] + len(q) + 1) + U)
        return total, bound + 3 * U * (abs(total) + bound)


def _gamma(n: float) -> float:
    return n * U / (1 - n * U)


@contextmanager
def _kept(
    device: NearStorageDevice, schema: RecordSchema | None = None, engine: Engine | None = None
) -> Iterator[tuple[_Known, KeptRecords]]:
    path = os.path.join(device.path, "verify.records")
    own = NativeEngine() if engine is None else None
    try:
        known = _Known(schema or RecordSchema("fp16", 16, 24), path)
        records = device.open_records(engine or own, _CPU)  # type: ignore[arg-type]
        try:
            file = records.open(path)
            kept = records.keep_records(known.layout(file))
            yield known, kept
            kept.release()
            records.close_file(file)
        finally:
            records.close()
    finally:
        if own is not None:
            own.close()
        with suppress(OSError):
            os.unlink(path)


def scores_every_record(device: NearStorageDevice) -> None:
    """Formats and lengths; records without tokens; numbers in any order, and twice; urgent or not;
    holes that are read or skipped."""
    rng = np.random.default_rng(1)
    for schema in (
        RecordSchema("fp32", 8, 8),
        RecordSchema("fp16", 16, 128),
        RecordSchema("bf16", 24, 40),
    ):
        with _kept(device, schema) as (known, kept):
            for seed, some in enumerate(
                (
                    np.arange(_RECORDS),
                    rng.integers(0, _RECORDS, 40),
                    np.array([2, 2, 0]),
                    np.empty(0, np.int64),
                )
            ):
                query = known.query(seed)
                ticket = kept.maxsim(
                    some, [query], gap_bytes=(0, 1 << 16)[seed % 2], is_urgent=seed < 2
                )
                known.require_right(ticket.finish(), some, query, f"records in {schema.format}")
                least = (
                    int(schema.sizes(known.n_tokens[np.unique(some)]).sum())
                    if device.kind == "plain"
                    else 0
                )
                asked = ticket.stats.bytes_asked
                require(
                    asked >= least,
                    "bytes asked of a ticket",
                    got=asked,
                    expected=f"at least {least}",
                )


def names_every_record_once(device: NearStorageDevice) -> None:
    """Records are named as they are scored, in any order; what was named can be had at once."""
    with _kept(device) as (known, kept):
        some, query = np.arange(_RECORDS)[::-1].copy(), known.query(4)
        ticket, named, is_all = kept.maxsim(some, [query]), list[int](), False
        while not is_all:
            items, is_all = ticket.next()
            known.require_right(
                ticket.scores[items], some[items], query, "records that `next` has named"
            )
            named += items.tolist()
        require(
            sorted(named) == list(range(_RECORDS)),
            "places that `next` has named",
            got=len(named),
            expected=f"each of {_RECORDS} once",
        )


def scores_pairs(device: NearStorageDevice) -> None:
    """Several queries of one request, each for some of its records; further ones that are added."""
    with _kept(device) as (known, kept):
        some, asked = np.array([5, 2, 90, 7]), [known.query(3), known.query(10)]
        first = Pairs(np.array([0, 0, 1, 3]), np.array([0, 1, 1, 0]))
        more = Pairs(np.array([1, 2]), np.array([0, 1]))
        ticket = kept.maxsim(some, asked, first)
        ticket.add(more)
        found, at = ticket.finish(), 0
        for pairs in (first, more):
            for item, query in zip(pairs.item.tolist(), pairs.query.tolist(), strict=True):
                known.require_right(
                    found[at : at + 1],
                    some[item : item + 1],
                    asked[query],
                    f"query {query} of a request",
                )
                at += 1
        require(at == len(found), "scores of pairs", got=len(found), expected=at)


def refuses_numbers_outside(device: NearStorageDevice) -> None:
    with _kept(device) as (known, kept):
        for wrong in (-1, _RECORDS):
            with raises(errors.InvalidInputError):
                kept.maxsim(np.array([0, wrong]), [known.query(1)]).finish()
        known.require_right(
            kept.maxsim(np.array([3]), [known.query(1)]).finish(),
            np.array([3]),
            known.query(1),
            "after a refusal",
        )


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _kept(device) as (known, kept):

        def ask(seed: int) -> None:
            for turn in range(20):
                some, query = (
                    np.random.default_rng(100 * seed + turn).integers(0, _RECORDS, 20),
                    known.query(seed + turn),
                )
                known.require_right(
                    kept.maxsim(some, [query]).finish(), some, query, "with other threads"
                )

        in_threads(ask, range(4))


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with _kept(device, engine=engine) as (known, kept):
        some, query = np.arange(0, 60), known.query(2)
        yield lambda: known.require_right(
            kept.maxsim(some, [query], deadline_s=deadline_s).finish(),
            some,
            query,
            "after an error",
        )


CHECKS = (
    scores_every_record,
    names_every_record_once,
    scores_pairs,
    refuses_numbers_outside,
    answers_threads_at_once,
)
FAULT_CHECKS = fault_checks(_asked)
