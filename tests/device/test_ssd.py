"""The plain SSD as a device: what it attends over against plain attention over the same rows."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from espnx import errors
from espnx.device.interface import SegmentView
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import Queries, RowsInMemory
from tests.device.rows import Seen, assert_right, attend, draw, normal, opened, put, queries

LAYOUTS = {
    "fp32": RowLayout("fp32", 128, 64),
    "fp16": RowLayout("fp16", 64, 64),
    "bf16": RowLayout("bf16", 24, 40),
    "int8": RowLayout("int8", 64, 96),
    "x": RowLayout("bf16", 192, 192, is_shared=True),
    "least": RowLayout("fp16", 128, 128, least_rows=100),
}
KINDS = pytest.mark.parametrize("kind", LAYOUTS)


@KINDS
def test_one_segment(folder: Path, path: str, kind: str) -> None:
    """Around the ends of a block, all of its rows and fewer."""
    layout, rng = LAYOUTS[kind], torch.Generator().manual_seed(1)
    one = layout.block_rows
    with opened(folder, engine=path) as device:
        assert device.path_report()[0].effective_path.split()[0] == path
        for n in (1, one - 1, one, one + 1, 3 * one + 2):
            if n < 1:
                continue
            stored = put(device, layout, 2, range(3), n, rng)
            for used in sorted({0, 1, n - 1, n, min(one, n)}):
                seen = [each.use(i, used) for i, each in enumerate(stored)]
                look = queries(layout, 2, 3, 2, rng)
                assert_right(attend(device, layout, seen, look), seen, look)


def test_grouped_queries(folder: Path) -> None:
    """As a model has them: query heads of a KV head stand beside each other, and each position sees
    those up to its own."""
    rng = torch.Generator().manual_seed(2)
    layout = RowLayout("fp32", 64, 64)
    n_sequences, n_kv, group, past, n = 3, 2, 4, 77, 5
    k, v = draw(layout, n_sequences, range(n_kv), past + n, rng)
    assert v is not None
    q = normal(n_sequences, n_kv * group, n, 64, rng=rng)
    wanted = F.scaled_dot_product_attention(
        q, k, v, torch.ones(n, past + n, dtype=torch.bool).tril(past), enable_gqa=True
    )
    with opened(folder) as device:
        uses = [
            SegmentView(segment, i, past + n, 0)
            for i, segment in enumerate(device.put(layout, k, v, range(n_kv)))
        ]
        look = Queries(
            (q / 8).view(n_sequences, n_kv, group * n, 64),
            64,
            (past + torch.arange(n)).repeat(group),
        )
        o, _ = device.attend(device.ahead(layout, uses), look)
    # 2 gamma(d + tokens) of scores and of weighted sums of values up to 5, on both sides
    torch.testing.assert_close(
        o.view(wanted.shape), wanted, rtol=0, atol=4 * (64 + past + n) * 2.0**-24 * 5
    )


@pytest.mark.sampled(1)
@KINDS
@pytest.mark.parametrize("window_bytes", [1, 100_000, 64 << 20])
def test_ragged_programs(folder: Path, path: str, kind: str, window_bytes: int) -> None:
    """Several segments a sequence, of which each may be shared or empty, heads in parts, masks and
    a tail; windows smaller than a read."""
    layout, rng, chance = (
        LAYOUTS[kind],
        torch.Generator().manual_seed(3),
        random.Random(kind + path + str(window_bytes)),
    )
    one, n_heads = layout.block_rows, 1 if layout.is_shared else 3
    with opened(
        folder, engine=path, read_ahead_bytes=window_bytes, threads=chance.choice([1, 2, 3])
    ) as device:
        parts = [range(n_heads)] if n_heads == 1 else [range(0, 3, 2), range(1, 3, 2)]
        for _ in range(4):
            n_sequences = chance.randint(1, 3)
            seen: list[Seen] = []
            for sequence in range(n_sequences):
                position = chance.choice([0, 5])
                for _ in range(chance.randint(0, 3)):
                    n = chance.choice([0, 1, one - 1, one, one + 1, 2 * one + 3])
                    used = chance.randint(0, n)
                    for heads in parts:
                        seen.append(
                            put(device, layout, 1, heads, n, rng)[0].use(sequence, used, position)
                        )
                    position += used
            if seen and n_sequences > 1:  # a prefix that sequences share, each its own length of it
                shared = chance.choice(seen)
                seen += [
                    shared.kept.use(i, chance.randint(0, shared.kept.segment.n_rows), 7)
                    for i in range(n_sequences)
                ]
            tail, longest = (
                None,
                max([each.use.first_position + each.use.n_rows for each in seen], default=0),
            )
            if chance.random() < 0.7:
                k = normal(n_sequences, n_heads, 9, layout.d, rng=rng).to(
                    chance.choice([torch.float32, torch.float16, torch.bfloat16])
                )
                v = (
                    k
                    if layout.is_shared
                    else normal(n_sequences, n_heads, 9, layout.dv, rng=rng).to(k.dtype)
                )
                tail = RowsInMemory(k, v, chance.randint(0, 3), chance.randint(0, 6), longest)
            positions = longest + 9
            look = queries(
                layout,
                n_sequences,
                n_heads,
                3,
                rng,
                last_position=torch.tensor([positions // 2, -1, positions])
                if chance.random() < 0.5
                else None,
                first_visible=torch.randint(0, positions + 1, (n_sequences,), generator=rng)
                if chance.random() < 0.5
                else None,
                visible=torch.randint(0, 2, (n_sequences, positions), generator=rng).to(torch.uint8)
                if chance.random() < 0.5
                else None,
            )
            assert_right(attend(device, layout, seen, look, tail), seen, look, tail)


def test_hidden_rows_have_no_effect(folder: Path) -> None:
    """Whatever they hold; what a query sees has one."""
    layout, rng = RowLayout("fp16", 64, 64), torch.Generator().manual_seed(4)
    k, v = draw(layout, 1, range(1), 40, rng)
    assert v is not None
    k[:, :, 10:20], v[:, :, 10:20] = torch.nan, torch.inf
    visible = torch.ones(1, 40, dtype=torch.uint8)
    visible[:, 10:20] = 0
    with opened(folder) as device:
        segment = device.put(layout, k, v, range(1))[0]

        def run(**masks: torch.Tensor) -> torch.Tensor:
            o, _ = device.attend(
                device.ahead(layout, [SegmentView(segment, 0, 40, 0)]),
                Queries(torch.ones(1, 1, 1, 64), 64, **masks),
            )
            return o.isfinite().all()

        assert run(visible=visible)
        assert run(first_visible=torch.tensor([20]))
        assert run(last_position=torch.tensor([9]))
        assert not run()
        assert not run(first_visible=torch.tensor([19]))
        assert not run(last_position=torch.tensor([10]))


@KINDS
def test_visit(folder: Path, kind: str) -> None:
    """Every row of every use once, where the pieces say."""
    layout, rng = LAYOUTS[kind], torch.Generator().manual_seed(5)
    n = 4 * layout.block_rows + 1
    with opened(folder) as device:
        a, b = put(device, layout, 2, range(2), n, rng)
        uses = [a.use(0, n, 0), a.use(2, n - 1, 50), b.use(1, 1, 0), b.use(1, 0, 9)]
        found: dict[tuple[int, int, int], torch.Tensor] = {}
        moved = 0

        def see(memory: torch.Tensor, pieces: np.ndarray) -> None:
            nonlocal moved
            moved += memory.numel()
            for sequence, head, offset, rows, first in pieces.tolist():
                size = layout.blocks(rows) * layout.block_bytes
                k, v = layout.unpack(
                    memory[offset : offset + size].view(-1, layout.block_bytes), rows
                )
                for i in range(rows):
                    assert (sequence, head, first + i) not in found
                    found[sequence, head, first + i] = torch.cat([k[i], v[i]]).double()

        device.visit(device.ahead(layout, [each.use for each in uses]), see)
        stats = device.stats()
    wanted = {
        (each.use.sequence, head, each.use.first_position + i): torch.cat(
            [each.kept.k[head, i], each.kept.v[head, i]]
        ).double()
        for each in uses
        for head in range(2)
        for i in range(each.use.n_rows)
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    blocks = 2 * (layout.blocks(n) + 1)  # what two sequences share is read once
    assert stats.bytes_asked == moved == blocks * layout.block_bytes


def test_an_error_of_the_visitor(folder: Path) -> None:
    """Is the caller's; every ticket is invalid, and the rows are as they were."""
    layout, rng = LAYOUTS["fp16"], torch.Generator().manual_seed(6)
    with opened(folder) as device:
        stored = put(device, layout, 1, range(1), 100, rng)[0].use(0)
        tickets = [device.ahead(layout, [stored.use]) for _ in range(2)]

        def see(memory: torch.Tensor, pieces: np.ndarray) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            device.visit(tickets[0], see)
        assert device.front() == -1
        look = queries(layout, 1, 1, 1, rng)
        with pytest.raises(errors.InvalidInputError, match="in the order"):
            device.attend(tickets[1], look)
        assert_right(attend(device, layout, [stored], look), [stored], look)


def test_tickets(folder: Path) -> None:
    """One after the other, once each, and none after `forget`."""
    layout, rng = LAYOUTS["fp16"], torch.Generator().manual_seed(7)
    look = queries(layout, 1, 2, 1, rng)
    with opened(folder) as device:
        seen = [put(device, layout, 1, range(2), n, rng)[0].use(0) for n in (10, 200, 33)]
        tickets = [device.ahead(layout, [each.use]) for each in seen]
        assert len(set(tickets)) == 3
        assert device.front() == tickets[0]
        for wrong in (tickets[1], tickets[2], tickets[2] + 1):
            with pytest.raises(errors.InvalidInputError, match="in the order"):
                device.attend(wrong, look)
        for ticket, each in zip(tickets[:2], seen, strict=False):
            assert_right(device.attend(ticket, look), [each], look)
        assert device.front() == tickets[2]
        with pytest.raises(errors.InvalidInputError, match="in the order"):
            device.attend(tickets[0], look)
        device.forget()
        assert device.front() == -1
        with pytest.raises(errors.InvalidInputError, match="in the order"):
            device.attend(tickets[2], look)
        again = device.ahead(layout, [seen[2].use])
        assert again not in tickets
        assert_right(device.attend(again, look), [seen[2]], look)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window_bytes", [4096, 200_000, 64 << 20])
def test_many_tickets_ahead(folder: Path, path: str, window_bytes: int) -> None:
    """Of different layouts; rows that come while earlier tickets wait change nothing."""
    rng = torch.Generator().manual_seed(8)
    with opened(folder, engine=path, read_ahead_bytes=window_bytes) as device:
        line = []
        for i, layout in enumerate([*LAYOUTS.values()] * 3):
            seen = [
                each.use(j, first_position=i)
                for j, each in enumerate(put(device, layout, 2, range(2), 50 * i, rng))
            ]
            line.append((layout, seen, device.ahead(layout, [each.use for each in seen])))
        for layout, seen, ticket in line:
            look = queries(layout, 2, 2, 1, rng)
            assert_right(device.attend(ticket, look), seen, look)


def test_segments_longer_than_a_read(folder: Path, path: str) -> None:
    """Cut into reads by several threads at once."""
    layout, rng = RowLayout("fp16", 128, 128), torch.Generator().manual_seed(9)
    with opened(folder, engine=path, threads=3) as device:
        seen = [
            each.use(i, 9000 - i)
            for i, each in enumerate(put(device, layout, 2, range(2), 9000, rng))
        ]
        look = queries(layout, 2, 2, 4, rng, last_position=torch.tensor([8999, 5000, 1, 100]))
        for _ in range(3):
            assert_right(attend(device, layout, seen, look), seen, look)
        assert device.stats().bytes_asked == 3 * 4 * layout.blocks(9000) * layout.block_bytes


def test_nothing_to_see(folder: Path) -> None:
    layout, rng = LAYOUTS["fp16"], torch.Generator().manual_seed(10)
    look = queries(layout, 2, 2, 3, rng)
    with opened(folder) as device:
        assert_right(attend(device, layout, [], look), [], look)
        seen = [each.use(i) for i, each in enumerate(put(device, layout, 2, range(2), 0, rng))]
        assert [each.use.segment.size_bytes for each in seen] == [0, 0]
        assert_right(attend(device, layout, seen, look), seen, look)
        tail = RowsInMemory(normal(2, 2, 4, 64, rng=rng), normal(2, 2, 4, 64, rng=rng), 4, 0, 0)
        assert_right(attend(device, layout, seen, look, tail), seen, look, tail)
        for each in seen:
            device.release(each.use.segment)
        assert (
            device.stats().bytes_asked
            == device.stats().bytes_written
            == device.stats().stored_bytes
            == 0
        )
