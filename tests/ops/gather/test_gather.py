"""gather on the CPU, by torch's indexing, and what it refuses: in the same words on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops._native import load_extension, load_ops
from espnx.ops.gather import cuda, gather, gather_reference
from espnx.ops.gather.places import places

VERSIONS = pytest.mark.parametrize("version", [gather, gather_reference, cuda.gather_cuda])


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_records_of_every_size(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping, in any order, empty ones, both ends; by the CPU's version, and by what a GPU
    without compiled kernels does, in pieces."""
    sizes = unit * torch.tensor([0, 1, 5, 0, 0, 300, 7, 64, 0])
    offsets = unit * torch.tensor([9, 299, 2, 0, 300, 0, 40, 236, 300])
    buffer = random_bytes(300 * unit + 1)
    expected = gather_reference(buffer, offsets, sizes)
    assert expected.numel() == int(sizes.sum())
    assert torch.equal(gather(buffer, offsets, sizes), expected)
    for at_once in (7, 1 << 22):
        monkeypatch.setattr(cuda, "_INDEXED_AT_ONCE", at_once)
        assert torch.equal(cuda.gather_cuda(buffer, offsets, sizes), expected)


def test_a_buffer_at_an_odd_address() -> None:
    buffer = random_bytes(100)[1:]
    offsets, sizes = torch.tensor([0, 8, 16]), torch.tensor([8, 16, 83])
    expected = gather_reference(buffer, offsets, sizes)
    assert torch.equal(cuda.gather_cuda(buffer, offsets, sizes), expected)


def test_shared_out_between_threads() -> None:
    """By bytes: one long record and many short ones, several MiB."""
    buffer = random_bytes(3 << 20)
    sizes = torch.tensor([3 << 20, *range(3000), 0, 1_500_001])
    offsets = torch.arange(sizes.numel()) % 50
    offsets[0] = 0
    found = places(buffer, offsets, sizes)
    out = torch.empty(found.total_bytes, dtype=torch.uint8)
    for threads in (1, 3):
        load_extension().gather(buffer, offsets, found.begin, out.zero_(), threads)
        assert torch.equal(out, gather_reference(buffer, offsets, sizes))


def test_none() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for version in (gather, gather_reference, cuda.gather_cuda):
        assert version(random_bytes(5), none, none).shape == (0,)
        assert version(random_bytes(5), torch.tensor([5]), torch.tensor([0])).shape == (0,)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 1), (0, -1), (0, 5), (5, 0), (4, 1), (2**62, 2**62), (-(2**63), 1), (1, 2**63 - 1)],
)
def test_records_outside_the_buffer(offset: int, size: int) -> None:
    """The same text by every version; the extension refuses them, too."""
    buffer, one = random_bytes(4), torch.tensor([0])
    offsets, sizes = torch.tensor([0, offset]), torch.tensor([4, size])
    texts = set()
    for version in (gather, gather_reference, cuda.gather_cuda):
        with pytest.raises(InvalidInputError) as caught:
            version(buffer, offsets, sizes)
        texts.add(str(caught.value))
    (text,) = texts
    assert f"range 1 (offset_bytes {offset}, size_bytes {size})" in text
    if 0 <= size < 2**62:
        with pytest.raises((IndexError, ValueError)):
            load_extension().gather(
                buffer, torch.tensor([offset]), torch.tensor([0, size]), buffer[:0], 1
            )
    with pytest.raises(IndexError, match="record 0"):
        load_extension().gather(buffer, one - 1, torch.tensor([0, 4]), buffer.clone(), 1)


@VERSIONS
def test_other_arguments(version: object) -> None:
    one = torch.tensor([1])
    for match, *args in (
        ("buffer", torch.zeros(4), one, one),
        ("buffer", random_bytes(8)[::2], one, one),
        ("buffer", random_bytes(8).view(2, 4), one, one),
        ("offset_bytes", random_bytes(4), one.int(), one),
        ("size_bytes", random_bytes(4), one, one.float()),
        ("size_bytes", random_bytes(4), one, torch.tensor([0, 1])),
        ("offset_bytes", random_bytes(4), one.to("meta"), one),
    ):
        with pytest.raises(InvalidInputError, match=f"gather {match}"):
            version(*args)  # type: ignore[operator]


def test_more_than_any_memory() -> None:
    huge: Any = SimpleNamespace(numel=lambda: 2**62, data_ptr=lambda: 64)
    with pytest.raises(InvalidInputError, match="bytes in all"):
        places(huge, torch.zeros(2, dtype=torch.int64), torch.tensor([2**60, 1]))
    exact = places(huge, torch.zeros(2, dtype=torch.int64), torch.tensor([2**60 - 1, 1]))
    assert exact.total_bytes == int(exact.begin[-1]) == 2**60


def test_the_op() -> None:
    load_ops()
    args = (random_bytes(40), torch.tensor([0, 7]), torch.tensor([33, 2]))
    torch.library.opcheck(torch.ops.espnx.gather.default, args)
    wide = torch.stack(args[1:], dim=1)
    assert torch.equal(gather(args[0], wide[:, 0], wide[:, 1]), gather_reference(*args))
