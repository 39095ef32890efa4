"""Rotations, locks and shares of attention, each by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.kv.passages import mass
from espnx.kv.passages.mass import KEPT_TOKENS, MassRecord, check_heads
from espnx.kv.passages.pins import Pins
from espnx.kv.passages.rotation import Rotation


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("pairs", [1, 3, 8])
def test_rotations_by_complex_numbers(pairs: int, *, is_interleaved: bool) -> None:
    made = torch.Generator().manual_seed(pairs)
    rows = torch.randn(2, 3, 5, 16, generator=made, dtype=torch.float64)
    radians = torch.rand(pairs, generator=made, dtype=torch.float64)
    rotation, moved = Rotation(tuple(radians.tolist()), is_interleaved), [7, -100_000]
    found = rotation.turned(rows, moved)
    first = slice(0, 2 * pairs, 2) if is_interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if is_interleaved else slice(pairs, 2 * pairs)
    for part, by in enumerate(moved):
        as_complex = torch.complex(rows[part, ..., first], rows[part, ..., second])
        wanted = as_complex * torch.polar(torch.ones(pairs, dtype=torch.float64), radians * by)
        torch.testing.assert_close(found[part, ..., first], wanted.real)
        torch.testing.assert_close(found[part, ..., second], wanted.imag)
    assert torch.equal(found[..., 2 * pairs :], rows[..., 2 * pairs :])
    torch.testing.assert_close(rotation.turned(found, [-by for by in moved]), rows)
    one = rotation.turned(rows[:1], moved)
    torch.testing.assert_close(one[0], found[0])
    assert one.is_contiguous()


def test_locks(tmp_path: Path) -> None:
    one, two = Pins(str(tmp_path / "PINS")), Pins(str(tmp_path / "PINS"))
    assert one.use(1)
    assert one.use(1)
    assert two.use(1)
    assert not one.take(1), "its own use counts"
    two.leave(1)
    one.leave(1)
    assert not two.take(1), "it is used once more"
    one.leave(1)
    assert two.take(1)
    assert not two.take(1)
    assert not one.use(1)
    assert not one.take(1)
    assert one.take(2), "another extent"
    two.share(1)
    assert one.use(1)
    two.close()
    two.close()
    one.leave(1)
    assert one.take(1)
    descriptor = one._fd
    del one
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_shares_are_kept_by_token() -> None:
    """Means of all heads, and those heads by themselves that are watched, in their order."""
    made, watched = torch.Generator().manual_seed(0), [(1, 3), (0, 0), (1, 0)]
    record, wanted = MassRecord(2, 3), torch.rand(2, 2, 4, 90, 3, generator=made)
    record.watch(watched)
    begin = 0
    for n in (64, 1, 1, 7, 1, 16):
        for layer in range(2):
            for row in range(2):  # one sequence of the batch at a time
                part = wanted[row : row + 1, layer, :, begin : begin + n]
                record.note(layer, begin, range(row, row + 1), part.permute(3, 0, 1, 2))
        begin += n
    means = wanted.mean(dim=2)
    heads = torch.stack([wanted[:, layer, head] for layer, head in watched], dim=1)
    for (first, found), known in ((record.shares(), means), (record.head_shares(), heads)):
        assert first == 0
        torch.testing.assert_close(found, known, rtol=1e-6, atol=0)
    record.select([1, 1, 0])
    record.crop(70)
    for (_, found), known in ((record.shares(), means), (record.head_shares(), heads)):
        torch.testing.assert_close(found, known[[1, 1, 0], :, :70], rtol=1e-6, atol=0)
    record.crop(0)
    assert record.shares()[1].shape[2] == record.head_shares()[1].shape[2] == 0


def test_heads_are_watched_from_then_on() -> None:
    record = MassRecord(1, 1)
    record.note(0, 0, range(1), torch.zeros(1, 1, 2, 5))
    record.watch([(0, 1)])
    record.note(0, 5, range(1), torch.tensor([[[[7.0, 7.0]], [[1.0, 2.0]]]]).view(1, 1, 2, 2))
    first, found = record.head_shares()
    assert (first, found.tolist()) == (5, [[[[1.0], [2.0]]]])
    assert record.shares()[0] == 0
    record.watch([])
    record.note(0, 7, range(1), torch.zeros(1, 1, 2, 1))
    assert record.head_shares()[1].numel() == 0
    assert record.count == 8


@pytest.mark.parametrize("heads", [[(2, 0)], [(0, 4)], [(-1, 0)], [(0,)], [(0, True)], 3, "ab"])
def test_heads_that_a_model_has_not(heads: object) -> None:
    with pytest.raises(errors.InvalidInputError, match="heads of attention"):
        check_heads(heads, 2, 4)


def test_shares_of_a_long_text_are_of_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of heads in a bound of bytes: here 100 tokens."""
    monkeypatch.setattr(mass, "KEPT_HEAD_BYTES", 4 * 100)
    record, begin = MassRecord(1, 1), 0
    record.watch([(0, 0)])
    for n in (KEPT_TOKENS - 1, 5, 3 * KEPT_TOKENS, 1, KEPT_TOKENS // 2, 1):
        values = torch.arange(begin, begin + n, dtype=torch.float32)
        record.note(0, begin, range(1), values.view(1, 1, 1, n))
        begin += n
        for (first, found), most in ((record.shares(), KEPT_TOKENS), (record.head_shares(), 100)):
            assert first + found.shape[2] == begin == record.count
            assert found.shape[2] == min(begin, most)
            assert found.flatten().tolist() == list(range(first, begin))
    assert record._means._kept.numel() <= 2 * KEPT_TOKENS
    assert record._heads._kept.numel() <= 200
    record.crop(3)
    assert record.shares()[1].shape[2] == record.head_shares()[1].shape[2] == 0
