"""The border between torch's tensors and the extension: what goes in, what comes out, and who keeps
what alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from espnx.errors import InvalidInputError
from espnx.ops import attention, crc32c, crc32c_ranges, maxsim
from espnx.ops._native import is_direct, load_ops
from espnx.storage import NativeEngine
from espnx.storage.native import load_native

EVERY_DTYPE = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)
ONE, FILE = torch.tensor([4096]), torch.zeros(3, dtype=torch.int64)


def planned(offset_bytes: Any) -> list[int]:
    """Where the reads of three pieces of a file begin."""
    offsets: torch.Tensor = load_native().pack_plan(
        ONE * 100, ONE, FILE, offset_bytes, torch.full((3,), 10), 0, 1 << 20
    )[1]
    return offsets.tolist()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NativeEngine]:
    (tmp_path / "it").write_bytes(bytes(range(256)) * 16)
    with NativeEngine() as engine:
        yield engine


def read(engine: NativeEngine, path: Path, out: torch.Tensor | None = None) -> Any:
    """Bytes 7 to 106."""
    file = engine.open(path / "it")
    return engine.native.submit(
        reading=True,
        file=torch.tensor([file.number]),
        offset_bytes=torch.tensor([7]),
        size_bytes=torch.tensor([100]),
        out_offset_bytes=None if out is None else torch.tensor([0]),
        crc32c=None,
        memory=out,
        gap_bytes=0,
        priority=0,
        deadline_s=30.0,
    )


def test_nothing_of_torch_is_linked() -> None:
    """One build serves every torch: it asks the one that is there."""
    compiled = Path(load_native().__file__).read_bytes()  # type: ignore[attr-defined]
    assert b"dlpack_exchange_api" in compiled
    assert b"libtorch" not in compiled
    assert b"libc10" not in compiled


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_one_dtype_and_no_other(dtype: torch.dtype) -> None:
    # of dtypes that torch has not finished, or gives up
    with warnings.catch_warnings(action="ignore"):
        offsets = torch.empty(3, dtype=dtype)
    if dtype == torch.int64:
        assert planned(offsets.zero_()) == [0]
    else:
        with pytest.raises(
            InvalidInputError,
            match="offset_bytes must be a one-dimensional int64 tensor on the CPU",
        ):
            planned(offsets)


def test_views() -> None:
    """Strides, offsets into a storage, and repeated entries are looked through."""
    many = torch.tensor([[9 << 16, 1 << 16, 5], [9 << 16, 2 << 16, 5], [9 << 16, 3 << 16, 5]])
    assert planned(many[:, 1]) == [1 << 16, 2 << 16, 3 << 16]
    assert planned(many.T[1]) == planned(many[:, 1].contiguous())
    assert planned(torch.tensor([8192]).expand(3)) == [8192]
    assert planned(torch.nn.Parameter(many[:, 1].clone(), requires_grad=False)) == planned(
        many[:, 1]
    )
    buffer, at, size = (
        torch.arange(64).to(torch.uint8),
        torch.tensor([[0, 3], [1, 4], [2, 5]]),
        torch.tensor([9, 9, 9]),
    )
    assert torch.equal(
        crc32c_ranges(buffer[8:], at[:, 1], size), crc32c_ranges(buffer, at[:, 1] + 8, size)
    )
    with pytest.raises(InvalidInputError, match="buffer"):
        crc32c_ranges(buffer[::2], at[:, 0], size)
    with pytest.raises(InvalidInputError, match="offset_bytes must be a one-dimensional"):
        planned(many)


@pytest.mark.parametrize(
    "other", [None, 3, [0, 1, 2], "torch", FILE.numpy(), torch.Tensor], ids=str
)
def test_what_is_no_tensor(other: object) -> None:
    with pytest.raises(TypeError, match=r"incompatible function arguments"):
        planned(other)


def test_tensors_without_memory() -> None:
    fake = FakeTensorMode().from_tensor(FILE)
    for offsets in (FILE.to("meta"), fake, FILE.to_sparse()):
        with pytest.raises(InvalidInputError, match="on the CPU"):
            planned(offsets)
    with pytest.raises(ValueError, match=r"got torch\.uint8 \[5\] on meta"):
        load_native().crc32c_ranges(torch.empty(5, dtype=torch.uint8, device="meta"), FILE, FILE, 0)


def test_memory_that_is_not_aligned() -> None:
    """Only others make such: torch lets a tensor of int64 begin at any address that it is given."""
    memory = bytearray(8 * 4)
    odd, ids = (
        torch.frombuffer(memory, dtype=torch.int64, offset=1, count=3),
        torch.zeros(1, dtype=torch.int64),
    )
    counts = torch.frombuffer(memory, dtype=torch.uint16, offset=1, count=3)
    with pytest.raises(InvalidInputError, match="offset_bytes must begin at a multiple of 8 bytes"):
        planned(odd)
    with pytest.raises(InvalidInputError, match="aligned uint16"):
        load_native().lay_out_records(counts, 8, 8, 4096)
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="offset_bytes must begin at a multiple of"):
        load_native().crc32c_ranges(buffer, odd, FILE, 0)
    assert crc32c_ranges(buffer[1:], ids, ids).tolist() == [0]  # bytes may lie anywhere


def test_one_checksum_of_a_tensor_without_memory() -> None:
    """Its address would be nowhere."""
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        crc32c(mode.from_tensor(FILE))


def test_results_beyond_any_memory() -> None:
    """Tensors without an entry may have sizes whose product no integer holds."""
    queries = torch.empty(1 << 40, 0, 8)
    many = torch.zeros(1 << 24, dtype=torch.int64)
    with pytest.raises(MemoryError):
        load_native().maxsim(
            queries, torch.empty(0, dtype=torch.uint8), many, many, "fp16", 1, None, None
        )
    with pytest.raises(MemoryError):
        load_native().attend_rows(None, -1, q=torch.empty(1 << 40, 1 << 20, 8, 0), dv=8, threads=1)


def test_results_are_tensors_like_any_other(engine: NativeEngine, tmp_path: Path) -> None:
    transfer = read(engine, tmp_path)
    items, finished = transfer.next(1, 10.0)
    position = transfer.position_bytes
    assert finished
    for found, dtype, shape in (
        (items, torch.int64, (1,)),
        (position, torch.int64, (1,)),
        (transfer.memory, torch.uint8, None),
    ):
        assert type(found) is torch.Tensor
        assert (found.dtype, found.device.type, found.is_contiguous(), found.requires_grad) == (
            dtype,
            "cpu",
            True,
            False,
        )
        assert shape is None or found.shape == shape
        found.add_(1)  # it is writable
    assert items.tolist() == [1]  # 0, and one more
    assert transfer.position_bytes.tolist() == (position - 1).tolist()  # a copy
    assert transfer.memory[position - 1].item() == 8  # no copy: it was 7
    nothing = load_native().lay_out_records(torch.empty(0, dtype=torch.uint16), 8, 8, 4096)[0]
    assert (nothing.shape, nothing.dtype) == ((0,), torch.int64)


def test_results_outlive_what_made_them(engine: NativeEngine, tmp_path: Path) -> None:
    kept = []
    for _ in range(4):
        transfer = read(engine, tmp_path)
        transfer.next(1, 10.0)
        kept.append((transfer.memory, transfer.position_bytes))
        del transfer
    engine.close()
    gc.collect()
    churn = [torch.full((4096,), 255, dtype=torch.uint8) for _ in range(64)]
    for memory, position in kept:
        begin = int(position)
        assert memory[begin : begin + 100].tolist() == list(range(7, 107))
    assert len(churn) == 64


def test_memory_is_let_go_of(engine: NativeEngine, tmp_path: Path) -> None:
    """As many references as before, once the engine is asked for anything after a transfer has
    ended."""
    out = torch.empty(4096, dtype=torch.uint8)
    storage = out.untyped_storage()
    before = sys.getrefcount(storage)
    transfers = [read(engine, tmp_path, out) for _ in range(10)]
    for transfer in transfers:
        assert transfer.next(1, 10.0)[1]
    assert sys.getrefcount(storage) > before
    del transfers, transfer
    engine.stats()
    assert sys.getrefcount(storage) == before


def calls() -> dict[str, Any]:
    """A small call of each op, by the op's name."""
    buffer = torch.arange(64).to(torch.uint8) % 32
    at, one = torch.tensor([0, 16]), torch.tensor([1, 1])
    return {
        "maxsim": lambda: maxsim(torch.ones(2, 8), buffer, at, one),
        "crc32c": lambda: crc32c_ranges(buffer, at, one),
        "attention": lambda: attention(
            torch.ones(1, 1, 1, 8), buffer, at[:1].view(1, 1, 1), one[:1], block_rows=1
        ),
    }


@pytest.mark.parametrize("name", ["maxsim", "crc32c", "attention"])
def test_ops_go_through_torch_only_where_somebody_looks_on(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load_ops()
    call = calls()[name]
    wanted = call()
    op = getattr(torch.ops.espnx, name).default
    traced = make_fx(call)()
    assert op in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(), wanted, rtol=0, atol=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = calls()[name]()
    for fake, real in zip(
        *((each,) if isinstance(each, torch.Tensor) else each for each in (found, wanted)),
        strict=True,
    ):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)

    # or torch 2.11 warns that it keeps one cycle
    with torch.profiler.profile(acc_events=True) as profile:
        call()
    assert f"espnx::{name}" in {event.key for event in profile.key_averages()}
    with warnings.catch_warnings(action="ignore"):  # torch gives it up
        assert f"espnx::{name}" in str(torch.jit.trace(lambda unused: call(), torch.zeros(1)).graph)

    monkeypatch.setattr(torch.ops.espnx, name, None)
    with torch.overrides.BaseTorchFunctionMode(), pytest.raises(TypeError, match="not callable"):
        call()
    torch.testing.assert_close(call(), wanted, rtol=0, atol=0)


def test_a_query_with_a_gradient_says_that_it_gets_none() -> None:
    load_ops()
    buffer, at, one = (
        torch.zeros(64, dtype=torch.uint8),
        torch.tensor([0, 16]),
        torch.tensor([1, 1]),
    )
    scores = maxsim(torch.ones(2, 8, requires_grad=True), buffer, at, one)
    assert scores.requires_grad
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        scores.sum().backward()
    each = torch.vmap(lambda query: maxsim(query, buffer, at, one))(torch.ones(3, 2, 8))
    assert torch.equal(each, torch.zeros(3, 2))


NOT_PROMISED = [
    "torch._C._len_torch_function_stack",
    "torch._C._functorch.maybe_current_level",
    "torch.autograd.profiler._is_profiler_enabled",
]


def test_a_torch_without_a_name_that_it_never_promised() -> None:
    """Every call goes by the dispatcher then, and finds the same: in a child for each name, of one
    process that has imported torch."""
    code = f"""
import importlib, os, torch
for name in {NOT_PROMISED!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    module, _, attribute = name.rpartition(".")
    delattr(importlib.import_module(module), attribute)
    from espnx.ops import _native, crc32c_ranges
    data = torch.arange(64, dtype=torch.uint8)
    assert not _native.is_direct(data)
    found = crc32c_ranges(data, torch.tensor([0, 9]), torch.tensor([64, 9])).tolist()
    print(found, flush=True)
    os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    data = torch.arange(64, dtype=torch.uint8)
    assert is_direct(data)
    found = crc32c_ranges(data, torch.tensor([0, 9]), torch.tensor([64, 9])).tolist()
    assert done.stdout.splitlines() == [str(found)] * len(NOT_PROMISED)
