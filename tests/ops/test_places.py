"""The one look at the tables of an op, in C++: the same errors as the checks by torch, which share
no code with it, and the same alignments and sizes as numbers of Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx import streams
from espnx.errors import InvalidInputError
from espnx.ops import ranges
from espnx.ops._native import load_extension
from espnx.ops.attention import checks as attention_checks
from espnx.ops.attention.cuda import _alignment
from espnx.ops.maxsim import FORMATS
from espnx.ops.maxsim import checks as maxsim_checks
from espnx.ops.tables import copied, on_device, on_host

CPU = torch.device("cpu")
BUFFERS = (0, 1, 4096, 4095, 1 << 20, 2**62, 2**63 - 1)
FAR = (-1, -(2**63), -(2**63) + 15, 2**62, 2**63 - 1, 2**63 - 16, 65536)


def buffer_of(n_bytes: int, address: int) -> Any:
    """A buffer that nobody reads: of any size, at any address."""
    return SimpleNamespace(numel=lambda: n_bytes, data_ptr=lambda: address)


def text_of(check: Callable[[], Any]) -> str | None:
    try:
        check()
    except InvalidInputError as error:
        return str(error)
    return None


def multiple_of(numbers: list[int]) -> int:
    return math.gcd(16, *numbers)


class Drawn:
    """Records of a buffer: most lie inside, at multiples of something; in half of the cases one
    number is wrong, or as large as may be."""

    def __init__(self, seed: int, unit: int, count_max: int):
        draw = random.Random(seed)
        self.n_bytes = draw.choice(BUFFERS)
        self.address = draw.choice([0, 16, 4096, 2**47 + 8, 2**63 + 4, 4097])
        step, n = draw.choice([1, 2, 4, 8, 16, 48]), draw.choice([0, 1, 2, 7, 40])
        self.offsets, self.counts = [], []
        for _ in range(n):
            offset = draw.randrange(self.n_bytes // step + 1) * step
            room = min((self.n_bytes - offset) // unit, count_max)
            self.offsets.append(offset)
            self.counts.append(draw.choice([0, room, draw.randrange(room + 1) // step * step]))
        if n and draw.random() < 0.5:
            which = draw.choice([self.offsets, self.counts])
            at = draw.randrange(n)
            near = (which[at] + 1, self.n_bytes, self.n_bytes + 1, count_max, count_max + 1)
            which[at] = min(draw.choice(FAR + near), 2**63 - 1)

    @property
    def buffer(self) -> Any:
        return buffer_of(self.n_bytes, self.address)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.tensor(self.offsets, dtype=torch.int64),
            torch.tensor(self.counts, dtype=torch.int64),
        )


def test_ranges() -> None:
    right = 0
    for seed in range(600):
        drawn = Drawn(seed, 1, 2**63 - 1)
        tables = drawn.tables
        expected = text_of(lambda t=tables, n=drawn.n_bytes: ranges.check_inside("gather", n, *t))
        begin = torch.full((len(drawn.offsets) + 1,), -1)
        given = ("gather", drawn.buffer, *tables, begin)
        assert text_of(lambda g=given: ranges.look_inside(*g)) == expected
        if expected is not None:
            continue
        found = ranges.look_inside(*given)
        places = [drawn.address + each for each in drawn.offsets]
        assert found.multiple == multiple_of(places + drawn.counts)
        sums = [sum(drawn.counts[:i]) for i in range(len(drawn.counts) + 1)]
        assert found.total_bytes == min(sums[-1], 2**60 + 1)
        if sums[-1] <= 2**60:
            assert begin.tolist() == sums
        right += 1
    assert 200 < right < 500


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bit1"])
def test_records_of_maxsim(fmt: str) -> None:
    token, right, aligned = FORMATS[fmt], 0, 0
    for seed in range(600):
        row_bytes = token.token_row_bytes(random.Random(seed).choice([8, 128, 65536]))
        drawn = Drawn(seed, row_bytes, maxsim_checks.TOKENS_MAX)
        tables = drawn.tables

        def by_torch(
            drawn: Drawn = drawn, tables: Any = tables, row_bytes: int = row_bytes
        ) -> bool:
            maxsim_checks.check_inside(drawn.n_bytes, *tables, row_bytes)
            # addresses in 64 bits with a sign
            return maxsim_checks.check_aligned(drawn.address % 2**32, tables[0], token)

        def by_look(drawn: Drawn = drawn, tables: Any = tables, row_bytes: int = row_bytes) -> bool:
            found = maxsim_checks.look_inside(drawn.buffer, *tables, row_bytes)
            assert found.tokens_max == max(drawn.counts, default=0)
            low = buffer_of(drawn.n_bytes, drawn.address % 2**32)
            return maxsim_checks.is_aligned(found, low, tables[0], token)

        expected = text_of(by_torch)
        assert text_of(by_look) == expected
        if expected is None and drawn.offsets:
            assert by_look() is by_torch()
            right, aligned = right + 1, aligned + by_look()
    assert right > 60
    assert aligned > 10


def blocks_case(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    n, n_kv, n_blocks = draw.choice([0, 1, 3]), draw.choice([1, 2]), draw.choice([0, 1, 4])
    block_rows = draw.choice([1, 7, 256, 1 << 20])
    size_bytes = draw.choice([64, 1, 1 << 30, 2**62])
    n_bytes = draw.choice(BUFFERS)
    step = draw.choice([1, 2, 4, 16, 48])
    last = max(n_bytes - size_bytes, 0)
    offsets = [
        [[draw.randrange(last // step + 1) * step for _ in range(n_blocks)] for _ in range(n_kv)]
        for _ in range(n)
    ]
    room = n_blocks * block_rows
    rows = [draw.choice([0, room, draw.randrange(room + 1)]) for _ in range(n)]
    visible = None
    if draw.random() < 0.3:
        visible = torch.ones(n, draw.choice([room, room // 2 + 1, room + 5]), dtype=torch.uint8)
    if n and draw.random() < 0.5:
        i = draw.randrange(n)
        if n_blocks and draw.random() < 0.7:
            # also where no row needs it: then it is not looked at
            wrong = draw.choice([*FAR, last, min(last + 1, 2**63 - 1), n_bytes])
            offsets[i][draw.randrange(n_kv)][draw.randrange(n_blocks)] = wrong
        else:
            rows[i] = draw.choice([*FAR, room + 1])
    return {
        "buffer": buffer_of(n_bytes, draw.choice([0, 4096, 2**47 + 8, 4098])),
        "offsets": torch.tensor(offsets, dtype=torch.int64).view(n, n_kv, n_blocks),
        "rows": torch.tensor(rows, dtype=torch.int64),
        "block_rows": block_rows,
        "size_bytes": size_bytes,
        "visible": visible,
    }


def test_blocks_of_attention() -> None:
    right = 0
    for seed in range(1500):
        case = blocks_case(seed)
        buffer, offsets, rows = case["buffer"], case["offsets"], case["rows"]
        given = (offsets, rows, case["block_rows"], case["size_bytes"], case["visible"])
        expected = text_of(lambda b=buffer, g=given: attention_checks.check_inside(b.numel(), *g))
        assert text_of(lambda b=buffer, g=given: attention_checks.look_inside(b, *g)) == expected
        if expected is not None:
            continue
        right += 1
        found = attention_checks.look_inside(buffer, *given)
        assert found.rows_max == max(rows.tolist(), default=0)
        needed = [
            buffer.data_ptr() + int(offset)
            for sequence, n_rows in zip(offsets, rows.tolist(), strict=True)
            for head in sequence
            for offset in head[: -(-n_rows // case["block_rows"])]
        ]
        assert found.multiple == multiple_of(needed)
        for fmt, element in (("fp32", 4), ("fp16", 2), ("int8", 4)):
            if found.multiple == 16 or found.multiple >= element:
                assert _alignment(found, fmt) == (16 if found.multiple == 16 else element)
            else:
                with pytest.raises(InvalidInputError, match=f"multiples of {element} bytes"):
                    _alignment(found, fmt)
    assert 500 < right < 1400


def test_tables_that_changed_under_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found wrong is never launched, also when it is right by the time of its text."""
    for module in (ranges, maxsim_checks, attention_checks):
        monkeypatch.setattr(module, "check_inside", lambda *args: None)
    one, buffer = torch.tensor([5]), buffer_of(4, 0)
    calls: list[Callable[[], Any]] = [
        lambda: ranges.look_inside("gather", buffer, one, one),
        lambda: maxsim_checks.look_inside(buffer, one, one, 16),
        lambda: attention_checks.look_inside(buffer, one.view(1, 1, 1), one, 16, 16, None),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="changed during the call"):
            call()


def test_what_the_extension_refuses() -> None:
    extension = load_extension()
    two, three = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for given, message in (
        ((two, three, 1, 1, 1, 0, None), "as many entries"),
        ((three[::2], two, 1, 1, 1, 0, None), "contiguous"),
        ((two, two, 0, 1, 1, 0, None), "unit_bytes"),
        ((two, two, 1, 1, 1, 0, two), "3 entries"),
        ((two.float(), two, 1, 1, 1, 0, None), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            extension.look_at_records(*given)
    blocks = torch.zeros(2, 1, 3, dtype=torch.int64)
    for given, message in (
        ((blocks, three, 1, 1, 3, 9, 0), "2 entries"),
        ((blocks, two, 0, 1, 0, 9, 0), "block_rows"),
        ((blocks, two, 2, 1, 7, 9, 0), "at most 6"),
        ((two, two, 1, 1, 1, 9, 0), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            extension.look_at_blocks(*given)
    with pytest.raises(ValueError, match="too short"):
        extension.pack([two, two], torch.empty(31, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        extension.pack([three[::2]], torch.empty(64, dtype=torch.uint8))


def test_tables_of_the_host_are_copied_together() -> None:
    """Each as it is, at a multiple of 16 bytes."""
    tables = [
        torch.arange(3).view(1, 3, 1),
        torch.tensor([5]),
        torch.tensor([[1, 0, 1]], dtype=torch.uint8),
        torch.arange(10).view(2, 5).T,
        torch.empty(1, 2, 0, dtype=torch.int64),
        torch.rand(1, 2, 3),
        torch.arange(4)[::2].expand(3, 2),
        torch.frombuffer(bytearray(range(41)), dtype=torch.int64, count=5, offset=1),
        torch.arange(9, dtype=torch.uint8)[1:],
    ]
    found = copied(tables, CPU)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1
    for table, there in zip(tables, found, strict=True):
        assert there.is_contiguous()
        assert there.dtype == table.dtype
        assert torch.equal(there, table)
        assert there.storage_offset() * there.itemsize % 16 == 0
    assert [each.shape for each in copied([tables[4]], CPU)] == [(1, 2, 0)]
    for table, here in zip(tables, on_host(*tables), strict=True):
        assert torch.equal(here, table)
        assert here.is_contiguous()
        assert here.data_ptr() % here.itemsize == 0
    plain = torch.arange(4)
    assert on_host(plain)[0] is plain
    assert on_device([plain], CPU)[0] is plain


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_for_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    asked: list[int] = []

    class StopError(Exception):
        pass

    def pinned(size_bytes: int) -> torch.Tensor:
        asked.append(size_bytes)
        raise StopError

    stand_in = SimpleNamespace(
        pinned=pinned, current=lambda device: None, is_capturing=lambda stream: False
    )
    monkeypatch.setitem(streams._OF_TYPE, "cuda", stand_in)
    if device == "cuda":
        with pytest.raises(StopError):
            copied([torch.ones(3)], torch.device(device))
        assert asked == [16]
    else:
        copied([torch.ones(3)], CPU)
        assert not asked
