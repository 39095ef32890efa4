"""The ops as torch sees them: schema, fake version, tracing."""

from __future__ import annotations

import math

import pytest
import torch

from espnx import errors
from espnx.ops import attention, crc32c_ranges, maxsim
from espnx.ops._native import load_ops
from espnx.ops.distances import VECTOR_FORMATS
from espnx.ops.distances.checks import query_dtype
from espnx.ops.maxsim import FORMATS
from tests.ops.records import integers, scatter


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 16), (3, 5, 16)])
def test_opcheck_maxsim(shape: tuple[int, ...], fmt: str) -> None:
    load_ops()
    records = scatter([integers(count, 16, seed=count) for count in (3, 0, 7)], fmt)
    book = records.codebook
    tables = (
        {} if book is None else {"centroids": book.centroids, "bucket_weights": book.bucket_weights}
    )
    torch.library.opcheck(torch.ops.espnx.maxsim.default, (integers(*shape), *records.args), tables)
    torch.library.opcheck(
        torch.ops.espnx.maxsim.default, (integers(*shape), *records.args, 2), tables
    )


def test_opcheck_crc32c() -> None:
    load_ops()
    buffer = torch.arange(100, dtype=torch.uint8)
    args = (buffer, torch.tensor([0, 50, 99]), torch.tensor([100, 7, 0]))
    torch.library.opcheck(torch.ops.espnx.crc32c.default, args)
    torch.library.opcheck(torch.ops.espnx.crc32c.default, (*args, 0xFFFFFFFF))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", VECTOR_FORMATS)
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_opcheck_distances(shape: tuple[int, ...], fmt: str) -> None:
    load_ops()
    query = torch.arange(math.prod(shape)).view(shape).to(query_dtype(fmt))
    buffer = torch.zeros(100, dtype=torch.uint8)
    args = (query, buffer, torch.tensor([0, 41, 7]), fmt)
    torch.library.opcheck(torch.ops.espnx.distances.default, (*args, "l2"))
    torch.library.opcheck(torch.ops.espnx.distances.default, (*args, "ip", 2))


def test_shapes_and_devices_without_data() -> None:
    load_ops()
    meta = torch.device("meta")
    place = torch.empty(11, dtype=torch.int64, device=meta)
    buffer = torch.empty(10**15, dtype=torch.uint8, device=meta)
    scores = torch.ops.espnx.maxsim(
        torch.empty(4, 32, 128, device=meta), buffer, place, place, "fp16"
    )
    assert (scores.shape, scores.dtype, scores.device) == ((4, 11), torch.float32, meta)
    found = torch.ops.espnx.distances(torch.empty(4, 96, device=meta), buffer, place, "fp16", "l2")
    assert (found.shape, found.dtype, found.device) == ((4, 11), torch.float32, meta)
    crcs = torch.ops.espnx.crc32c(buffer, place, place)
    assert (crcs.shape, crcs.dtype, crcs.device) == ((11,), torch.int64, meta)


def test_cuda_versions_are_registered() -> None:
    """Dispatch would find them; running them needs a GPU."""
    load_ops()
    for name in ("espnx::maxsim", "espnx::crc32c"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


@pytest.mark.parametrize("kind", [ValueError, IndexError])
def test_what_another_device_s_kernel_raises_is_not_taken_for_the_caller_s_mistake(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Triton raises ValueError for a pointer it does not like: that says nothing of the tables."""
    load_ops()

    def fail(*args: object) -> None:
        raise kind("Pointer argument cannot be accessed from Triton")

    for name in ("attention", "crc32c", "maxsim"):
        monkeypatch.setattr(torch.ops.espnx, name, fail)
    there = torch.empty(64, dtype=torch.uint8, device="meta")
    rows = torch.zeros(1, dtype=torch.int64)
    calls = [
        lambda: attention(
            torch.empty(1, 1, 1, 8, device="meta"), there, rows.view(1, 1, 1), rows, block_rows=1
        ),
        lambda: crc32c_ranges(there, rows, rows),
        lambda: maxsim(torch.empty(1, 8, device="meta"), there, rows, rows),
    ]
    for call in calls:
        with pytest.raises(kind, match=r"^Pointer argument") as caught:
            call()
        assert not isinstance(caught.value, errors.EspnxError)
