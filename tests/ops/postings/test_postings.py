"""Posting lists scored in place, at every instruction set, beside the reference that reads them
byte by byte: the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espnx import errors
from espnx.ops import postings, postings_reference
from espnx.ops._native import load_extension, load_ops
from espnx.ops.postings import KINDS, VARIANTS, Rules

N_RECORDS, SALT = 200_000, 77


def numbers(n: int, below: int, make: torch.Generator) -> torch.Tensor:
    """int64 [n], ascending, all different; close together and far apart."""
    return torch.randperm(below, generator=make)[:n].sort().values


def encoded(
    kind: str, sizes: list[tuple[int, int]], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, lists) of lists of so many postings each, of which so many are a layer of their
    own."""
    make = torch.Generator().manual_seed(seed)
    encoder = load_extension().ListEncoder(SALT, KINDS.index(kind))
    buffer, lists, at = [torch.full((64,), 255, dtype=torch.uint8)], [], 64
    for term, (n, first) in enumerate(sizes):
        encoder.begin_list(term, torch.full((term % 9,), 65, dtype=torch.uint8), False)
        ends = [first, n - first] if first else [n]
        sizes_bytes = []
        for i, count in enumerate(ends):
            below = N_RECORDS if term % 2 else min(N_RECORDS, max(n, 3 * n // 2))
            records = numbers(count, below, make)
            if kind == "count":
                values = (torch.rand(count, generator=make) ** -1.5).clamp(1, 70_000).long()
            elif kind == "impact":
                values = torch.randint(1, 256, (count,), generator=make)
            else:
                values = torch.rand(count, generator=make).view(torch.int32).long()
            encoder.add(records.to(torch.uint32), values.to(torch.uint32))
            sizes_bytes.append(encoder.end_layer(i == len(ends) - 1))
        lists.append([at, sum(sizes_bytes), sizes_bytes[0] if first else 0, term])
        buffer.append(encoder.take())
        at += sum(sizes_bytes)
    return torch.cat(buffer), torch.tensor(lists, dtype=torch.int64).view(-1, 4)


def arguments(
    kind: str, sizes: list[tuple[int, int]], **rules: object
) -> tuple[tuple[object, ...], dict[str, torch.Tensor]]:
    buffer, lists = encoded(kind, sizes)
    make = torch.Generator().manual_seed(5)
    weights = torch.rand(len(sizes), 2, generator=make, dtype=torch.float64) + 0.1
    weights[:, 1] *= 0.1
    options = {}
    if kind == "count":
        options["lengths"] = torch.randint(0, 90, (N_RECORDS,), generator=make).to(torch.uint16)
        options["norms"] = torch.rand(90, generator=make, dtype=torch.float64) + 0.2
    return (buffer, lists, weights, Rules(SALT, kind, N_RECORDS, **rules), 40), options  # type: ignore[arg-type]


SIZES = [(1, 0), (127, 0), (128, 0), (129, 0), (7, 3), (1000, 0), (700, 130), (2, 0)]


def check(args: tuple[object, ...], options: dict[str, torch.Tensor]) -> None:
    found, expected = postings(*args, **options), postings_reference(*args, **options)  # type: ignore[arg-type]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_equal_the_reference_bit_for_bit(variant: str, cpu_level: str) -> None:
    check(*arguments("count", SIZES, variant=variant, constant=0.3))


@pytest.mark.parametrize("kind", ["impact", "float"])
def test_weights_equal_the_reference_bit_for_bit(kind: str, cpu_level: str) -> None:
    check(*arguments(kind, SIZES))


def test_no_list_and_few_records() -> None:
    args, options = arguments("impact", [])
    found = postings(*args, **options)  # type: ignore[arg-type]
    assert (found[0] == -1).all()
    assert torch.isneginf(found[1]).all()
    check(*arguments("impact", [(3, 0)]))


def test_filters(cpu_level: str) -> None:
    args, options = arguments("count", SIZES)
    options["allowed"] = torch.randint(0, 256, (N_RECORDS // 8,), dtype=torch.uint8)
    check(args, options)


def test_long_lists_and_many_windows(cpu_level: str) -> None:
    """Of every record, and of many: the best are those of a sum over all."""
    (buffer, lists, weights, rules, k), _ = arguments(
        "impact", [(N_RECORDS, 0), (120_001, 0), (50_000, 20_000)]
    )
    sums, has = torch.zeros(N_RECORDS), torch.zeros(N_RECORDS, dtype=torch.bool)
    for place, (offset, size, first, term) in enumerate(lists.tolist()):  # type: ignore[attr-defined]
        name = torch.full((term % 9,), 65, dtype=torch.uint8)
        data = buffer[offset : offset + size]  # type: ignore[index]
        decoded = load_extension().decode_list(data, SALT, 1, N_RECORDS, term, name, False, first)
        assert isinstance(decoded, tuple)
        records, values = decoded[0].long(), decoded[1].to(torch.int32).float()
        if first:  # a record may be in both layers here: one after the other, as the op adds them
            half = decoded[2]
            for part in (slice(None, half), slice(half, None)):
                sums[records[part]] += weights[place, 0].float() * values[part]  # type: ignore[index]
        else:
            sums[records] += weights[place, 0].float() * values  # type: ignore[index]
        has[records] = True
    order = torch.argsort(torch.where(has, sums, -torch.inf), descending=True, stable=True)[:k]  # type: ignore[misc]
    found = postings(buffer, lists, weights, rules, k)  # type: ignore[arg-type]
    assert torch.equal(found[0], order)
    assert torch.equal(found[1], sums[order])


def test_damage_is_refused_by_both() -> None:
    args, options = arguments("count", SIZES)
    for version in (postings, postings_reference):
        for place in (64 + 2, 64 + 33, 400, len(args[0]) - 1):  # type: ignore[arg-type]
            bent = args[0].clone()  # type: ignore[attr-defined]
            bent[place] ^= 16
            with pytest.raises(errors.InvalidInputError, match="posting list"):
                version(bent, *args[1:], **options)  # type: ignore[arg-type]
        outside = args[1].clone()  # type: ignore[attr-defined]
        outside[0, 0] = len(args[0])  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidInputError, match="posting list"):
            version(args[0], outside, *args[2:], **options)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidInputError, match="posting list"):
            version(*args[:3], replace(args[3], salt=1), 5, **options)  # type: ignore[arg-type, type-var]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": 0}, "k 0"),
        ({"kind": "words"}, "rules"),
        ({"variant": "bm26"}, "rules"),
        ({"lengths": None}, "lengths"),
        ({"norms": torch.zeros(3)}, "norms"),
        ({"allowed": torch.zeros(3, dtype=torch.uint8)}, "allowed"),
        ({"weights": torch.zeros(1, 2, dtype=torch.float64)}, "lists"),
        ({"buffer": torch.zeros(64, dtype=torch.int8)}, "buffer"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], match: str) -> None:
    (buffer, lists, weights, rules, k), options = arguments("count", [(3, 0), (4, 0)])
    given = {"buffer": buffer, "lists": lists, "weights": weights, "k": k, **options, **change}
    for name in ("kind", "variant"):
        if name in given:
            rules = replace(rules, **{name: given.pop(name)})  # type: ignore[type-var, arg-type]
    with pytest.raises(errors.InvalidInputError, match=match):
        postings(rules=rules, **given)  # type: ignore[arg-type]


def test_opcheck() -> None:
    load_ops()
    (buffer, lists, weights, rules, k), options = arguments("count", [(3, 0), (400, 0)])
    last = (rules.salt, 0, rules.n_records, k, 1, 1.5, 0.5, 0.0)  # type: ignore[attr-defined]
    torch.library.opcheck(
        torch.ops.espnx.postings.default,
        (buffer, lists, weights, options["lengths"], options["norms"], None, *last),
    )
    meta = [each.to("meta") for each in (buffer, lists, weights)]  # type: ignore[attr-defined]
    found = torch.ops.espnx.postings(*meta, None, None, None, SALT, 1, 5, 7, 0, 1.5, 0.5, 0.0)
    assert [(each.shape, each.dtype) for each in found] == [
        ((7,), torch.int64),
        ((7,), torch.float32),
    ]
