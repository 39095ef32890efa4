"""What one call of an op on a GPU asks of the host, before its kernel runs: how often it waits for
the device, what it queues there, and how many operations of torch it takes. On a device that is
late on purpose, with launches that do nothing but look at what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espnx.errors import InvalidInputError
from espnx.ops import attention, crc32c_ranges, device_code, maxsim
from espnx.ops import tables as op_tables
from espnx.ops._native import is_direct
from espnx.ops.attention import api as attention_api
from espnx.ops.attention import cuda as attention_cuda
from espnx.ops.crc32c import api as crc32c_api
from espnx.ops.crc32c import cuda as crc32c_cuda
from espnx.ops.gather import api as gather_api
from espnx.ops.gather import gather
from espnx.ops.maxsim import api as maxsim_api
from espnx.ops.maxsim import cuda as maxsim_cuda
from tests.device.gpu.late import LateDevice, LateTensor, late_device

HOST, DEVICE = "cpu", "late"
WHERE = pytest.mark.parametrize("where", [HOST, DEVICE])


class Operations(TorchDispatchMode):
    """Counts torch's operations, without those that only look at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        returned = [each.alias_info for each in func._schema.returns]
        if not returned or returned[0] is None or returned[0].is_write:
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Called:
    """A call, counted.

    Attributes:
        operations: of torch, by name, in order.
        waits: how often the host waited for the device.
        queued: operations on the device, copies among them, beside the launches.
        pageable: copies to the device of memory that is not pinned.
        launches: of the op's kernels: what each was given; `all`: and those of other calls.
    """

    def __init__(self, late: LateDevice, launches: list[tuple[Any, ...]]):
        self._late, self.all = late, launches
        self.operations: list[str] = []
        self.waits = self.queued = self.pageable = 0
        self.launches: list[tuple[Any, ...]] = []

    def of(self, call: Callable[[], Any]) -> Called:
        """Of the second time, when what is kept for a device is there."""
        call()
        late, n_launches, queued = self._late, len(self.all), self._late.main.queued
        late.waits.clear()
        late.pageable_copies = 0
        with Operations() as seen:
            call()
        self.operations, self.waits = seen.names, late.waits.total()
        self.queued, self.pageable = late.main.queued - queued, late.pageable_copies
        self.launches = self.all[n_launches:]
        return self


@pytest.fixture
def late() -> Iterator[LateDevice]:
    op_tables.unused.cache_clear()
    with late_device(3, eagerness=0.0) as device:
        yield device
    op_tables.unused.cache_clear()


@pytest.fixture
def called(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> Called:
    """The ops' versions for a GPU run past the dispatcher, as they do there."""
    launches: list[tuple[Any, ...]] = []

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append(args)

    def launch(*given: Any) -> None:
        launches.append(given[4])

    monkeypatch.setattr(device_code, "launch", launch)
    monkeypatch.setattr(device_code, "is_there", lambda *args: True)
    for module in (attention_cuda, maxsim_cuda, crc32c_cuda):
        monkeypatch.setattr(module, "load_kernel", lambda name: Kernels())
    for api in (attention_api, maxsim_api, crc32c_api, gather_api):
        monkeypatch.setattr(api, "is_direct", lambda *tensors, on="cpu": on == "cuda")
    nothing = torch.zeros(8, dtype=torch.int32).to(late.device)
    monkeypatch.setattr(crc32c_cuda, "device_tables", lambda device: nothing)
    monkeypatch.setattr(crc32c_cuda, "kernel_tables", lambda lanes, device: (nothing, nothing))
    return Called(late, launches)


def there(late: LateDevice, tensor: torch.Tensor, where: str) -> torch.Tensor:
    return tensor if where == HOST else tensor.to(late.device)


def assert_tables(late: LateDevice, launch: tuple[Any, ...], expected: list[torch.Tensor]) -> None:
    """The tables are among what the kernel was given, in their order, once the device has come so
    far."""
    late.main.synchronize()
    given = [each.inner for each in launch if isinstance(each, LateTensor)]
    at = 0
    for table in expected:
        while at < len(given) and not (
            given[at].dtype == table.dtype and torch.equal(given[at].view(-1), table.reshape(-1))
        ):
            at += 1
        assert at < len(given), table
        assert given[at].data_ptr() % 8 == 0


@WHERE
@pytest.mark.parametrize(
    ("d", "dv", "n_queries", "n_launches"), [(128, 128, 4, 2), (576, 0, 4, 1), (128, 128, 40, 2)]
)
def test_attention(
    called: Called, late: LateDevice, where: str, d: int, dv: int, n_queries: int, n_launches: int
) -> None:
    """Decoding, rows that are K and V at once, a part of a prompt. Parts of rows are merged."""
    rows, n_blocks = 64, 20 if dv else 7
    size = rows * 2 * (d + dv)
    query = torch.zeros(1, 2 * n_queries, 1, d, dtype=torch.float16).to(late.device)
    buffer = torch.zeros(2 * n_blocks * size, dtype=torch.uint8).to(late.device)
    offsets = torch.arange(2 * n_blocks).mul(size).view(1, 2, n_blocks)
    n_rows, last = torch.tensor([n_blocks * rows - 3]), torch.tensor([[n_blocks * rows]])
    tables = [there(late, each, where) for each in (offsets, n_rows, last)]

    def call() -> Any:
        return attention(
            *(query, buffer, *tables[:2]), block_rows=rows, dv=dv, last_position=tables[2]
        )

    found = called.of(call)
    assert found.waits == (where == DEVICE)
    assert found.pageable == 0
    # the query in fp32, scaled; tables: one copy, and those of the device side by side before that
    assert found.queued == (3 if where == HOST else 4)
    assert len(found.launches) == n_launches
    assert_tables(late, found.launches[0], [offsets, n_rows, last])
    made = 2 * n_launches
    assert sorted(found.operations) == sorted(
        ["_to_copy", "mul", *["empty"] * made]
        + (["full", "_to_copy"] if where == HOST else ["cat", "full", "copy_"])
    )


@WHERE
def test_attention_inside(called: Called, late: LateDevice, where: str) -> None:
    """As a cache of K and V calls it: nothing but memory for the results and for those of parts."""
    query = torch.zeros(1, 8, 1, 128).to(late.device)
    buffer = torch.zeros(2 * 20 * 64 * 512, dtype=torch.uint8).to(late.device)
    offsets, n_rows = torch.arange(40).mul(64 * 512).view(1, 2, 20), torch.tensor([1280])
    tables = there(late, offsets, where), there(late, n_rows, where)

    def call() -> Any:
        return attention_api.attention_inside(
            *(query, buffer, *tables),
            rows_max=1280,
            align_bytes=16,
            block_rows=64,
            format="fp16",
            dv=128,
        )

    found = called.of(call)
    assert (found.waits, found.pageable, found.queued) == (0, 0, where == HOST)
    copies = ["full", "_to_copy"] if where == HOST else []
    assert sorted(found.operations) == sorted(["empty"] * 4 + copies)
    assert_tables(late, found.launches[0], [offsets, n_rows])


@WHERE
@pytest.mark.parametrize("op", ["maxsim", "maxsim by Triton", "crc32c", "gather"])
def test_records(called: Called, late: LateDevice, where: str, op: str) -> None:
    query, short = (torch.zeros(32, d).to(late.device) for d in (128, 40))
    buffer = torch.zeros(1 << 16, dtype=torch.uint8).to(late.device)
    offsets, counts = torch.arange(9).mul(4096), torch.full((9,), 8)
    tables = there(late, offsets, where), there(late, counts, where)
    calls: dict[str, Callable[[], Any]] = {
        "maxsim": lambda: maxsim(query, buffer, *tables),
        "maxsim by Triton": lambda: maxsim(short, buffer, *tables),
        "crc32c": lambda: crc32c_ranges(buffer, *tables),
        "gather": lambda: gather(buffer, *tables),
    }
    found = called.of(calls[op])
    assert found.waits == (where == DEVICE)
    assert found.pageable == 0
    expected = ["empty"] + (["full", "_to_copy"] if where == HOST else ["cat", "full", "copy_"])
    if op == "maxsim":
        expected.append("zeros")  # in which its warps count documents
    if op == "gather":
        expected.append("empty")  # where records begin in the result
        if where == DEVICE:
            expected += ["full", "_to_copy"]
    assert sorted(found.operations) == sorted(expected)
    assert found.queued == sum(each in ("cat", "copy_", "_to_copy", "zeros") for each in expected)
    begins = torch.arange(10).mul(8) if op == "gather" else counts
    assert len(found.launches) == 1
    assert_tables(late, found.launches[0], [offsets, begins])


def test_who_is_called_past_the_dispatcher() -> None:
    """Tensors of one device, with nobody who looks on. (Of `meta` as of a GPU.)"""
    far, near = torch.empty(3, device="meta"), torch.empty(3)
    assert is_direct(far, far, on="meta")
    assert is_direct(near)
    assert not is_direct(far, near, on="meta")
    assert not is_direct(near, on="cuda")
    assert not is_direct(far.clone().requires_grad_(), on="meta")
    assert not is_direct(torch._neg_view(near))
    with Operations():
        assert not is_direct(far, on="meta")


def test_tables_of_the_host_in_a_captured_graph(
    called: Called, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would copy what lies in their place then."""
    monkeypatch.setattr(late, "is_capturing", lambda stream: True)
    buffer, places = torch.zeros(4096, dtype=torch.uint8).to(late.device), torch.arange(4)
    with pytest.raises(InvalidInputError, match="captured graph"):
        crc32c_ranges(buffer, places, places)
    assert not called.all
    crc32c_ranges(buffer, *(each.to(late.device) for each in (places, places)))


@WHERE
def test_what_is_wrong_is_told_before_anything_is_launched(
    called: Called, late: LateDevice, where: str
) -> None:
    """In the words of the CPU's version, and for one wait."""
    places, wrong = torch.tensor([0, 64, 128, 0]), torch.tensor([1, 2, 1, 1 << 40])
    blocks, one = places.view(4, 1, 1), torch.ones(4, dtype=torch.int64)
    outside = torch.tensor([0, 0, 4096, 0]).view(4, 1, 1)
    query, buffer = torch.zeros(4, 1, 1, 8), torch.zeros(4096, dtype=torch.uint8)
    calls: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = [
        (maxsim, (query.view(4, 8), buffer), (places, wrong)),
        (crc32c_ranges, (buffer,), (places, wrong)),
        (gather, (buffer,), (places, wrong)),
        (partial(attention, block_rows=1), (query, buffer), (outside, one)),
        (partial(attention, block_rows=2), (query, buffer), (blocks, wrong)),
    ]
    for call, data, tables in calls:
        with pytest.MonkeyPatch.context() as patch:
            for api in (attention_api, maxsim_api, crc32c_api, gather_api):
                patch.setattr(api, "is_direct", lambda *tensors, on="cpu": on == "cpu")
            with pytest.raises(InvalidInputError) as expected:
                call(*data, *tables)
        moved = [each.to(late.device) for each in data] + [there(late, x, where) for x in tables]
        late.waits.clear()
        with pytest.raises(InvalidInputError) as found:
            call(*moved)
        assert str(found.value) == str(expected.value)
        assert late.waits.total() == (where == DEVICE)
    assert not called.all
