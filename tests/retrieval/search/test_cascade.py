"""The cascade: coarse scores choose, full records decide; from SSD or RAM alike, and never a byte
unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.ops.maxsim import maxsim_reference, token_format
from espnx.retrieval.search.opened.ram_tier import RamTier
from espnx.storage import FaultRule, FaultyEngine
from tests.retrieval.common import (
    EVERYTHING,
    assert_ranking,
    build,
    corpus,
    exact_scores,
    memory_folder,
    queries,
)

COUNT = 300


@pytest.fixture(scope="module")
def written() -> list[espnx.Document]:
    return corpus(COUNT, dim=32, tokens=(0, 20))


@pytest.fixture(scope="module", params=["bit1", "int8", "residual2"])
def tiers(
    request: pytest.FixtureRequest, written: list[espnx.Document]
) -> Iterator[tuple[Path, str]]:
    with memory_folder() as folder:
        build(folder / "s", written, dims=(16, 32), coarse=request.param)
        yield folder / "s", request.param


def coarse_scores(
    index: espnx.Index, documents: list[espnx.Document], query: espnx.Encoded, weight: float
) -> dict[str, float]:
    """By id, from the documents' own vectors: first-stage similarity (exact, lists are flat) and
    MaxSim of the coarse tokens."""
    coarse = index.store.coarse
    assert coarse is not None
    fmt = token_format(coarse.schema.format)
    scores = {}
    for document in documents:
        assert document.vectors is not None
        rows = fmt.encode(document.vectors.tokens, coarse.codebook)
        one = torch.tensor([0]), torch.tensor([len(document.vectors.tokens)])
        maxsim = maxsim_reference(
            query.tokens, rows, *one, coarse.schema.format, codebook=coarse.codebook
        )
        scores[document.id] = (
            float(maxsim[0]) if len(document.vectors.tokens) else 0.0
        ) + weight * float(query.cls @ document.vectors.cls)
    return scores


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["ssd", "ram"])
@pytest.mark.parametrize("step", [0, 0.3, (0.1, 0.5)])
def test_head_is_exact_and_tail_in_coarse_order(
    tiers: tuple[Path, str],
    written: list[espnx.Document],
    where: str,
    step: float | tuple[float, ...],
) -> None:
    with espnx.open(tiers[0], coarse=where) as index:
        for query in queries(3, dim=32):
            result = index.search(
                query, k=COUNT, candidates=COUNT, cascade=40, nprobe=EVERYTHING, prefetch_step=step
            )
            assert (len(result.hits), result.reranked) == (COUNT, 40)
            head, tail = result.hits[:40], result.hits[40:]
            assert [hit.reranked for hit in result.hits] == [True] * 40 + [False] * (COUNT - 40)
            scores, bounds = exact_scores(written, query, 1.0, "fp16")
            assert_ranking(head, {hit.id: scores[hit.id] for hit in head}, bounds)
            expected = coarse_scores(index, written, query, 1.0)
            values = np.array([hit.score for hit in tail])
            assert np.allclose(values, [expected[hit.id] for hit in tail], atol=2e-2)
            assert (np.diff(values) <= 0).all()
            assert (
                min(expected[hit.id] for hit in head)
                >= max(expected[hit.id] for hit in tail) - 4e-2
            )


@pytest.mark.parametrize("where", ["ssd", "ram"])
def test_a_first_stage_that_is_not_cls(
    tmp_path: Path, written: list[espnx.Document], where: str
) -> None:
    """The similarity of pooled tokens is no stand-in for that of CLS vectors."""
    build(tmp_path / "s", written, dims=(16, 32), coarse="int8", pooling="mean")
    with espnx.open(tmp_path / "s", coarse=where) as index:
        for query in queries(2, dim=32):
            found = index.search(
                query, k=COUNT, candidates=COUNT, cascade=40, nprobe=EVERYTHING
            ).hits[40:]
            expected = coarse_scores(index, written, query, 0.0)
            assert np.allclose(
                [hit.score for hit in found], [expected[hit.id] for hit in found], atol=2e-2
            )


def test_ssd_and_ram_rank_alike(tiers: tuple[Path, str]) -> None:
    wanted = queries(9, dim=32)
    with espnx.open(tiers[0]) as on_ssd, espnx.open(tiers[0], coarse="ram") as in_ram:
        for options in (
            {"cascade": 5},
            {"cascade": 1, "candidates": 1},
            {"cascade": EVERYTHING, "nprobe": 1},
        ):
            one = [
                [(hit.id, round(hit.score, 3)) for hit in result.hits]
                for result in on_ssd.search(wanted, k=20, **options)
            ]
            other = [
                [(hit.id, round(hit.score, 3)) for hit in result.hits]
                for result in in_ram.search(wanted, k=20, **options)
            ]
            assert one == other
        assert in_ram.resident_bytes["coarse"] > 0
        assert on_ssd.resident_bytes["coarse"] == 0
        assert (
            in_ram.search(wanted[0], cascade=5, prefetch_step=0).bytes_asked
            < on_ssd.search(wanted[0], cascade=5).bytes_asked
        )


def test_whole_cascade_is_exact_search(tiers: tuple[Path, str]) -> None:
    with espnx.open(tiers[0], coarse="ram") as index:
        for query in queries(3, dim=32):
            exact = index.search(query, k=50, candidates=200, nprobe=EVERYTHING)
            assert (
                index.search(query, k=50, candidates=200, cascade=200, nprobe=EVERYTHING).hits
                == exact.hits
            )


def test_batches_filters_and_hot_documents(tiers: tuple[Path, str]) -> None:
    wanted = queries(8, dim=32)
    some = [f"doc-{i}" for i in range(0, COUNT, 2)]
    for where in ("ssd", "ram"):
        with espnx.open(tiers[0], coarse=where, hot="1MiB") as index:
            options = {"k": 12, "cascade": 20, "candidates": 100, "include": some}
            alone = [index.search(query, **options).hits for query in wanted]
            assert [result.hits for result in index.search(wanted, **options)] == alone
            assert {hit.id for hits in alone for hit in hits} <= set(some)
            assert index.search(wanted[0], cascade=3, include=[]).hits == []


def test_resident_rows_are_the_tier_s(tiers: tuple[Path, str]) -> None:
    with espnx.open(tiers[0]) as index:
        coarse = index.store.coarse
        assert coarse is not None
        resident = RamTier(coarse, torch.device("cpu"))
        numbers = np.random.default_rng(0).permutation(COUNT)
        future = coarse.read(numbers, gap_bytes=0)
        memory, at = future.wait(), future.position_bytes
        for number, mine, theirs in zip(
            numbers.tolist(), resident.position_bytes(numbers).tolist(), at.tolist(), strict=True
        ):
            size = int(coarse.n_tokens[number]) * coarse.schema.row_bytes
            mine, theirs = mine + resident.schema.fixed_bytes, theirs + coarse.schema.fixed_bytes
            assert torch.equal(resident.memory[mine : mine + size], memory[theirs : theirs + size])
        assert (
            resident.size_bytes
            == int(coarse.n_tokens.sum(dtype=np.int64)) * coarse.schema.row_bytes + 4 * COUNT
        )


def test_without_a_coarse_tier(store: Path) -> None:
    with (
        espnx.open(store) as index,
        pytest.raises(errors.InvalidInputError, match="cascade; got a store without a coarse tier"),
    ):
        index.search(queries(1)[0], cascade=5)


def test_a_failing_read_of_either_tier(tiers: tuple[Path, str]) -> None:
    query = queries(1, dim=32)[0]
    for fault in ("error", "flip"):
        # A bit may be flipped where nothing is read for: in a gap, or in a text of the same group
        # as that of a hit.
        count = 3 if fault == "error" else 20
        rules = [
            FaultRule(
                fault=fault,
                operation="read",
                path="*gen-*",
                begin_bytes=4096,
                nth=60,
                value=5,
                count=count,
            )
        ]
        with FaultyEngine(rules) as engine, espnx.open(tiers[0], engine=engine) as index:
            expected = None
            failures = 0
            for _ in range(60):
                try:
                    hits = index.search(query, cascade=9, prefetch_step=0.3).hits
                except errors.StorageError:
                    failures += 1
                else:
                    expected = expected or hits
                    assert hits == expected
            assert failures >= 1
            assert expected
