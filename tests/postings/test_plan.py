"""Which lists a batch of queries wants, in C++ (csrc/postings/plan.cpp), beside the same in plain
Python: to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.postings import BM25, VARIANTS
from espnx.postings.stored.layout import COUNT, FLOAT, IMPACT
from espnx.storage.native import load_native

NONE = np.zeros(0, np.int64)


def bits(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float64).view(np.int64))


def random_dictionary(random: np.random.Generator, n: int, kind: int) -> dict[str, Any]:
    removed = np.sort(random.choice(n, n // 4, replace=False)).astype(np.int64)
    df = random.integers(1, 50, n).astype(np.uint32)
    return {
        "hashes": np.sort(random.integers(0, 2**64, n, np.uint64)),
        "first": np.concatenate([[0], np.cumsum(random.integers(1, 9, n))]).astype(np.uint32),
        "df": df,
        "first_layer": None if kind == COUNT else random.integers(0, 3, n).astype(np.uint16),
        "exponents": None if kind != IMPACT else random.integers(-126, 121, n).astype(np.int8),
        "removed": removed,
        "removed_df": np.minimum(df[removed], random.integers(1, 60, len(removed))).astype(
            np.int64
        ),
        "kind": kind,
    }


def plain_plan(
    held: list[dict[str, Any]],
    numbers: np.ndarray,
    queries: list[list[tuple[int, float]]],
    rule: BM25,
    n_records: int,
) -> tuple[list[float], list[np.float32], list[list[Any]]]:
    """What `PostingsDictionaries.plan` returns, weights as they are."""
    weights, absents, rows = [], [], []
    for term in range(numbers.shape[1]):
        df = 0
        for i, each in enumerate(held):
            number = numbers[i, term]
            gone = dict(zip(each["removed"].tolist(), each["removed_df"].tolist(), strict=True))
            df += 0 if number < 0 else int(each["df"][number]) - gone.get(number, 0)
        if df <= 0:
            numbers[:, term] = -1
        is_bm25 = held[0]["kind"] == COUNT
        idf = rule.idf(min(df, n_records), n_records) if is_bm25 and df > 0 else 0.0
        weights.append(float(np.float32(idf)) if is_bm25 else 1.0)
        absents.append(np.float32(idf * rule.absent_part))
    place = 0
    for query, tokens in enumerate(queries):
        for i, each in enumerate(held):
            for j, (term, weight) in enumerate(tokens):
                number = numbers[i, term]
                if number < 0:
                    continue
                begin, end = each["first"][number : number + 2].astype(np.int64) * 64
                layer = 0 if each["first_layer"] is None else int(each["first_layer"][number]) * 64
                scale = 1.0 if each["exponents"] is None else 2.0 ** int(each["exponents"][number])
                counts = (
                    np.array([weights[term] * weight * scale, float(absents[term]) * weight])
                    .view(np.int64)
                    .tolist()
                )
                rows.append(
                    [i, number, begin, end - begin, layer, 0, 0, *counts, term, query, place + j]
                )
        place += len(tokens)
    return weights, absents, rows


@pytest.mark.parametrize("kind", [COUNT, IMPACT, FLOAT])
@pytest.mark.parametrize("n_segments", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_plans_are_those_of_plain_python(variant: str, n_segments: int, kind: int) -> None:
    random = np.random.default_rng(n_segments * 10 + kind)
    for _ in range(30):
        rule = BM25(
            variant,
            float(random.random() * 3),
            float(random.random()),
            float(random.integers(0, 2)),
        )
        held = [
            random_dictionary(random, int(random.integers(1, 40)), kind) for _ in range(n_segments)
        ]
        native = load_native().PostingsDictionaries()
        for each in held:
            native.add(*each.values())
        n_terms, n_records = int(random.integers(0, 12)), int(random.integers(1, 200))
        numbers = np.stack([random.integers(-1, len(each["df"]), n_terms) for each in held]).astype(
            np.int64
        )
        sizes = (
            random.integers(0, 6, int(random.integers(0, 5))) if n_terms else np.zeros(2, np.int64)
        )
        queries = [
            [(int(random.integers(n_terms)), float(random.normal())) for _ in range(size)]
            for size in sizes.tolist()
        ]
        tokens = [token for query in queries for token in query]
        given = numbers.copy()
        weights, absent, rows = native.plan(
            torch.from_numpy(given),
            torch.tensor([term for term, _ in tokens], dtype=torch.int64),
            bits([weight for _, weight in tokens]),
            torch.tensor([0, *np.cumsum(sizes).tolist()]),
            rule.number,
            n_records,
            rule.absent_part,
        )
        expected = plain_plan(held, numbers, queries, rule, n_records)
        assert np.array_equal(given, numbers)
        assert weights.numpy().view(np.float64).tolist() == expected[0]
        assert absent.numpy().tolist() == [float(each) for each in expected[1]]
        assert rows.tolist() == expected[2]


def test_terms_are_found_by_their_hashes() -> None:
    shared, last = 7, 2**64 - 1
    hashes = [
        np.array([0, 5, shared, shared, shared, last], np.uint64),
        np.array([5, last, last], np.uint64),
        np.zeros(0, np.uint64),
    ]
    native = load_native().PostingsDictionaries()
    for each in hashes:
        n = len(each)
        native.add(
            each,
            np.arange(n + 1, dtype=np.uint32),
            np.ones(n, np.uint32),
            None,
            None,
            NONE,
            NONE,
            COUNT,
        )
    wanted = np.array([5, 0, shared, last, 6, last - 1], np.uint64)
    numbers, several = native.look_up(torch.from_numpy(wanted.view(np.int64)))
    assert numbers.tolist() == [[1, 0, 2, 5, -1, -1], [0, -1, -1, 1, -1, -1], [-1] * 6]
    assert several == [(0, 2, 3), (1, 3, 2)]
    assert native.look_up(torch.zeros(0, dtype=torch.int64))[0].shape == (3, 0)


def test_what_does_not_fit_is_refused() -> None:
    native = load_native().PostingsDictionaries()
    good: list[Any] = [
        np.arange(3, dtype=np.uint64),
        np.arange(4, dtype=np.uint32),
        np.ones(3, np.uint32),
        None,
        None,
        NONE,
        NONE,
        COUNT,
    ]
    for place, bad in [
        (0, np.arange(3, dtype=np.uint32)),
        (0, np.arange(6, dtype=np.uint64)[::2]),
        (0, np.zeros((1, 3), np.uint64)),
        (1, np.arange(3, dtype=np.uint32)),
        (2, np.ones(4, np.uint32)),
        (3, np.ones(2, np.uint16)),
        (4, np.ones(2, np.int8)),
        (6, np.ones(1, np.int64)),
        (7, 3),
    ]:
        with pytest.raises(errors.InvalidInputError):
            load_native().PostingsDictionaries().add(*good[:place], bad, *good[place + 1 :])
    native.add(*good)
    numbers, tokens, first = (
        torch.zeros(1, 2, dtype=torch.int64),
        torch.tensor([0, 1]),
        torch.tensor([0, 2]),
    )
    fits: list[Any] = [numbers, tokens, bits([1.0, 1.0]), first, 0, 9, 0.0]
    assert len(native.plan(*fits)[2]) == 2
    for place, bad in [
        (0, torch.full((1, 2), 3)),
        (0, torch.zeros(2, 2, dtype=torch.int64)),
        (0, torch.zeros(2, dtype=torch.int64)),
        (1, torch.tensor([0, 2])),
        (1, torch.tensor([0, -1])),
        (2, bits([1.0])),
        (3, torch.tensor([0, 1])),
        (3, torch.tensor([1, 2])),
        (3, torch.tensor([0, 3, 2])),
        (3, torch.zeros(0, dtype=torch.int64)),
        (4, 5),
        (4, -1),
    ]:
        with pytest.raises(errors.InvalidInputError):
            native.plan(*fits[:place], bad, *fits[place + 1 :])
