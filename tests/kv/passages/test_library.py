"""The library on disk: what is written is found, by whoever has the same text; what is damaged,
half written or another's is not."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.kv.passages import library as libraries
from espnx.kv.passages.extent import Extent, Identity, RowShape
from espnx.kv.passages.library import DATA, INDEX, ExtentWriter, Library
from espnx.storage.native import FaultRule, FaultyEngine
from tests.storage.common import interrupted, patiently, until

SHAPE = RowShape(2, 3, RowLayout("fp32", 64, 32))
SPACE, OTHER = b"s" * 32, b"o" * 32


def opened(folder: Path, space: bytes = SPACE, **options: Any) -> Library:
    return Library(folder, space, {}, SHAPE, **options)


def ids_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 31, n).astype(np.int32)


def rows_of(ids: np.ndarray, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that only this text has."""
    made = torch.Generator().manual_seed(int(ids.sum()) % 1000 + layer)
    shape = (1, SHAPE.heads, len(ids))
    return torch.randn(*shape, 64, generator=made), torch.randn(*shape, 32, generator=made)


def filled(
    library: Library, ids: np.ndarray, before: list[np.ndarray] | None = None, cost: float = 1.0
) -> Extent | None:
    """The extent of a text, pinned."""
    identity = Identity.of(library.space, before or [], ids)
    found = library.write(identity, ids, cost)
    if not isinstance(found, ExtentWriter):
        return found
    with found:
        for layer in range(SHAPE.layers):
            k, v = rows_of(ids, layer)
            for begin in range(0, len(ids), 32):  # two blocks at a time
                part = slice(begin, begin + 32)
                found.rows(layer, k[:, :, part], v[:, :, part])
        return found.finish()


def found(library: Library, ids: np.ndarray, before: list[np.ndarray] | None = None) -> bool:
    """Whether a text is there."""
    (extent,) = library.find([(Identity.of(library.space, before or [], ids), ids)])
    if extent is not None:
        library.leave([extent])
    return extent is not None


def read(folder: Path, extent: Extent, name: str = DATA) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows as they lie in the data file, by what docs/passages.md says of it."""
    tokens, rows = extent.identity.tokens, 16  # of a block of 16 x (64 + 32) x 4 bytes
    rest = tokens % rows
    if (rows - rest) * 8 <= -(-tokens // rows) * rows:
        rest = 0
    blocks = -(-(tokens - rest) // rows)
    sums, packed = 4 * 2 * 3 * blocks, rest * 2 * 3 * (64 + 32) * 4
    front = -(-(128 + sums + packed) // 4096) * 4096
    data = torch.from_numpy(np.fromfile(folder / name, np.uint8)[extent.offset_bytes :].copy())
    begin, found = 128 + sums, []
    for layer in range(2):
        parts = []
        block_bytes = SHAPE.layout.block_bytes
        lead = front + layer * 3 * blocks * block_bytes
        raw = data[lead : lead + 3 * blocks * block_bytes].view(3, blocks, block_bytes)
        parts.append(SHAPE.layout.unpack(raw, tokens - rest))
        loose = list[torch.Tensor]()
        for width in (64, 32):
            size = 3 * rest * width * 4
            loose.append(
                data[begin : begin + size].clone().view(torch.float32).view(3, rest, width)
            )
            begin += size
        parts.append((loose[0], loose[1]))
        found.append((torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)))
    return found


@pytest.mark.parametrize("n", [1, 13, 14, 16, 17, 31, 64, 100, 127])
def test_rows_come_back(folder: Path, n: int) -> None:
    ids = ids_of(n)
    with_prefix = [ids_of(5, 1)]
    for turn in range(2):
        library = opened(folder)
        extent = filled(library, ids, with_prefix)
        assert extent is not None
        for layer, (k, v) in enumerate(read(folder, extent)):
            wanted = rows_of(ids, layer)
            assert torch.equal(k, wanted[0][0])
            assert torch.equal(v, wanted[1][0])
            for one, other in zip(library.rows(extent, layer), wanted, strict=True):
                assert torch.equal(one, other)
        assert library.stats()["extents"] == 1, turn
        assert library.stats()["row_bytes"] == n * 2 * 3 * 96 * 4
        library.close()


@pytest.mark.parametrize(
    ("n", "kept", "before"), [(1, 8192, 135168), (16, 69632, 135168), (128, 528384, 528384)]
)
def test_short_texts_take_little(n: int, kept: int, before: int) -> None:
    """The demo's model, 8 layers of 2 heads of 32 values in fp32, and what whole blocks took."""
    shape = RowShape(8, 2, RowLayout("fp32", 32, 32))
    assert shape.extent_bytes(n) == kept
    whole = -(-n // 32)
    assert before == -(-(128 + 4 * 16 * whole) // 4096) * 4096 + 16 * whole * 8192


@pytest.mark.parametrize("layout", [("fp32", 32), ("fp32", 64), ("bf16", 128), ("fp16", 8)])
def test_an_eighth_is_empty_at_most(layout: tuple[str, int]) -> None:
    shape = RowShape(3, 2, RowLayout(layout[0], layout[1], layout[1]))
    sums = 4 * 3 * 2
    for n in range(1, 400):
        blocks, packed = shape.blocks(n), shape.packed_tokens(n)
        assert packed < shape.layout.block_rows
        assert shape.block_tokens(n) <= blocks * shape.layout.block_rows
        in_blocks = blocks * shape.layout.block_rows * shape.token_bytes
        assert in_blocks - shape.block_tokens(n) * shape.token_bytes <= in_blocks / 8
        whole = in_blocks + packed * shape.token_bytes + 128 + sums * blocks
        assert whole <= shape.extent_bytes(n) < whole + 4096


def test_directories_share_the_extents(folder: Path) -> None:
    """In equal parts, each its own limit; and they have to be given as they were."""
    folders = [folder / name for name in "abc"]
    each = SHAPE.extent_bytes(40)
    library = Library(folders, SPACE, {}, SHAPE, limit_bytes=3 * (2 * each) + 5)
    extents = [filled(library, ids_of(40, seed)) for seed in range(6)]
    assert [extent.directory for extent in extents if extent] == [0, 1, 2, 0, 1, 2]
    assert filled(library, ids_of(40, 7)) is None, "all are in use"
    for seed, extent in enumerate(extents):
        assert extent is not None
        name = DATA if not extent.directory else f"passages-{extent.directory}.bin"
        for layer, (k, v) in enumerate(read(folders[extent.directory], extent, name)):
            wanted = rows_of(ids_of(40, seed), layer)
            assert torch.equal(k, wanted[0][0])
            assert torch.equal(v, wanted[1][0])
    assert library.stats()["file_bytes"] == 6 * each
    assert library.verify() == (6 * each, 0)
    library.leave([extent for extent in extents if extent])
    assert filled(library, ids_of(40, 8)) is not None
    library.close()
    for wrong in ([folders[0]], [folders[0], folders[2], folders[1]], folders[:2]):
        with pytest.raises(errors.FormatError, match="in the same order"):
            Library(wrong, SPACE, {}, SHAPE)
    more = Library([*folders, folder / "d"], SPACE, {}, SHAPE)
    assert found(more, ids_of(40, 8))
    more.close()


def test_one_full_disk_of_several(folder: Path) -> None:
    """The others take what it cannot."""
    rules = [FaultRule(operation="allocate", path="*passages.bin", value=28)]
    library = Library(
        [folder / "a", folder / "b"], SPACE, {}, SHAPE, engine=lambda: FaultyEngine(rules)
    )
    for seed in range(3):
        extent = filled(library, ids_of(20, seed))
        assert extent is not None
        assert extent.directory == 1
    assert library.stats()["extents"] == 3
    library.close()


def test_only_the_same_text_behind_the_same_is_found(folder: Path) -> None:
    library, ids, before = opened(folder), ids_of(20), ids_of(4, 2)
    assert filled(library, ids, [before]) is not None
    assert found(library, ids, [before])
    assert found(library, ids, [before[:1], before[1:]]), "wherever the text before it is cut"
    assert not found(library, ids)
    assert not found(library, ids, [before[:3]])
    assert not found(library, ids[:19], [before])
    assert not found(library, ids[::-1].copy(), [before])
    other = opened(folder, OTHER)
    assert not found(other, ids, [before])
    for each in (library, other):
        each.close()


def test_files_are_nobody_elses(folder: Path) -> None:
    library = opened(folder)
    filled(library, ids_of(9))
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    library.close()


def test_descriptors_do_not_grow_with_the_library(folder: Path) -> None:
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    library = opened(folder)
    for seed in range(50):
        extent = filled(library, ids_of(3, seed))
        assert extent is not None
    assert len(os.listdir("/proc/self/fd")) - before <= 12
    assert len(list(folder.iterdir())) <= 6
    library.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_keeps_its_limit_and_the_cheap_go_first(folder: Path) -> None:
    each = SHAPE.extent_bytes(40)
    library = opened(folder, limit_bytes=3 * each + 4096)
    for seed, cost in ((1, 5.0), (2, 1.0), (3, 9.0)):
        extent = filled(library, ids_of(40, seed), cost=cost)
        assert extent is not None
        library.leave([extent])
    extent = filled(library, ids_of(40, 4), cost=3.0)
    assert extent is not None
    there = [found(library, ids_of(40, seed)) for seed in (1, 2, 3, 4)]
    assert there == [True, False, True, True]
    assert os.path.getsize(folder / DATA) <= 3 * each + 4096
    library.close()


def test_what_is_used_stays(folder: Path) -> None:
    """By this library, by another; and what does not fit at all is not kept."""
    each = SHAPE.extent_bytes(40)
    library, other = (opened(folder, limit_bytes=2 * each) for _ in range(2))
    mine = filled(library, ids_of(40, 1))
    theirs = filled(other, ids_of(40, 2))
    assert mine is not None
    assert theirs is not None
    assert filled(library, ids_of(40, 3)) is None
    other.leave([theirs])
    assert filled(library, ids_of(40, 3)) is not None
    assert not found(other, ids_of(40, 2))
    assert found(other, ids_of(40, 1))
    assert filled(library, ids_of(400, 4)) is None
    assert found(library, ids_of(40, 1)), "nothing is evicted for what does not fit"
    for one in (library, other):
        one.close()


def test_a_search_that_fails_leaves_what_it_found(folder: Path) -> None:
    """By a device that stalls, or by Ctrl-C: what it had found may be evicted."""
    each, texts = SHAPE.extent_bytes(40), [ids_of(40, seed) for seed in (1, 2)]
    with contextlib.closing(opened(folder)) as library:
        for ids in texts:
            filled(library, ids)

    def fails(deadline_s: float, way: type[BaseException]) -> None:
        engine = FaultyEngine([FaultRule("never", operation="read", count=1)])
        library = opened(folder, engine=lambda: engine, deadline_s=deadline_s, limit_bytes=2 * each)
        wanted = [(Identity.of(SPACE, [], ids), ids) for ids in texts]
        stalls = interrupted(lambda: engine.stats().fault_hits == 1)
        with contextlib.closing(library):
            meanwhile = stalls if way is KeyboardInterrupt else contextlib.nullcontext()
            with meanwhile, pytest.raises(way):
                library.find(wanted)
            for seed in (3, 4):
                assert filled(library, ids_of(40, seed)) is not None
            engine.close(grace_s=0.05)
        with contextlib.closing(opened(folder, limit_bytes=2 * each)) as library:
            for ids in texts:
                assert filled(library, ids) is not None

    fails(0.05, errors.DeadlineExceededError)
    fails(60.0, KeyboardInterrupt)


def test_half_written_extents_are_nobodys(folder: Path) -> None:
    """An error in the midst, and a process that went without a word."""
    library, ids = opened(folder), ids_of(20)
    identity = Identity.of(SPACE, [], ids)
    writer = library.write(identity, ids, 1.0)
    assert isinstance(writer, ExtentWriter)
    with pytest.raises(errors.StateError, match="before all its rows"), writer:
        writer.finish()
    assert library.stats()["extents"] == 0
    writer = library.write(identity, ids, 1.0)
    assert isinstance(writer, ExtentWriter)
    other = opened(folder)
    assert other.write(identity, ids, 1.0, wait_s=0.05) is None, "it is being written"
    library._pins.close()  # as when its process is gone
    taken = other.write(identity, ids, 1.0, wait_s=0.05)
    assert isinstance(taken, ExtentWriter)
    with taken:
        pass
    other.close()


@pytest.mark.parametrize("ends", ["deadline", "error", "Ctrl-C"])
def test_what_lands_late_lands_in_nobodys_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A write that was given up comes to the disk after all, while somebody else fills the library:
    its place is used again after that, and not before."""
    each, ids = SHAPE.extent_bytes(40), ids_of(40)

    def attempt(limit_s: float) -> bool | None:
        where = folder / f"{limit_s:g}"
        late = FaultRule("delay", operation="write", count=1, value=int(5e9 * limit_s))
        failing = FaultRule("error", operation="write", nth=2, count=1)
        rules = [late] if ends != "error" else [failing, late]
        engine = FaultyEngine(rules, request_bytes=4096)
        deadline_s = limit_s if ends == "deadline" else 1e3
        slow = opened(where, engine=lambda: engine, deadline_s=deadline_s)

        def interrupted(future: object) -> None:
            assert until(lambda: engine.stats().in_flight > 0)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if ends == "Ctrl-C":
                patch.setattr(libraries.NativeFuture, "wait", interrupted)
            with pytest.raises((errors.StorageError, KeyboardInterrupt)):
                filled(slow, ids)
        others = opened(where)
        try:
            extents = [filled(others, ids), filled(others, ids_of(40, 1))]
            if slow.stats()["late"] == 0:
                return None  # it was not late enough for this machine
            assert until(lambda: slow.stats()["late"] == 0)
            assert engine.stats().in_flight == 0
            extents.append(filled(others, ids_of(40, 2)))
            for seed, extent in enumerate(extents):
                assert extent is not None
                assert extent.offset_bytes == (each, 2 * each, 0)[seed]
                for layer, rows in enumerate(read(where, extent)):
                    wanted = rows_of(ids_of(40, seed), layer)
                    assert torch.equal(rows[0], wanted[0][0])
                    assert torch.equal(rows[1], wanted[1][0])
            assert others.verify() == (3 * each, 0)
        finally:
            for one in (slow, others):
                one.close()
        return True

    patiently(attempt, 0.1)


def test_a_library_that_is_closed_keeps_what_may_land(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its process lives; nothing else of it, and nothing without such a write."""
    monkeypatch.setattr(libraries, "_HELD", set())
    each, ids = SHAPE.extent_bytes(40), ids_of(40)
    for seed, is_given_up in enumerate((True, False)):
        where = folder / str(seed)
        engine = FaultyEngine([FaultRule("never", operation="write", nth=4, count=1)])
        # which waits for seconds
        monkeypatch.setattr(engine, "close", partial(engine.close, 0.05))
        library = opened(where, engine=lambda engine=engine: engine, deadline_s=0.5)
        used = filled(library, ids_of(1))  # in one write
        writer = library.write(Identity.of(SPACE, [], ids), ids, 1.0)
        assert isinstance(writer, ExtentWriter)
        if is_given_up:
            with pytest.raises(errors.DeadlineExceededError), writer:
                for layer in range(SHAPE.layers):
                    for _ in range(2):
                        writer.rows(layer, *(rows[:, :, :16] for rows in rows_of(ids, layer)))
        library.close()
        library.close()
        assert len(libraries._HELD) == is_given_up
        other = opened(where)
        assert used is not None
        assert other._index.evict_one(), "what it used is nobody's"
        extents = [filled(other, ids_of(40, 10 + n)) for n in range(2)]
        begins = [extent.offset_bytes for extent in extents if extent]
        begin = used.size_bytes
        assert begins == ([begin + each, begin + 2 * each] if is_given_up else [0, each])
        for pins in libraries._HELD:
            pins.close()  # as when its process is gone
        libraries._HELD.clear()
        last = filled(other, ids_of(40, 12))
        assert last is not None
        assert last.offset_bytes == (0 if is_given_up else 2 * each)
        other.close()


def test_a_child_leaves_its_parents_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it shares; and it does not wait for a lock that nobody of its own threads has."""
    library, other, ids = opened(folder), opened(folder), ids_of(40)
    identity, used = Identity.of(SPACE, [], ids), filled(library, ids_of(1))
    writer = library.write(identity, ids, 1.0)
    assert used is not None
    assert isinstance(writer, ExtentWriter)
    with monkeypatch.context() as patch:
        patch.setattr(library, "_process", os.getpid() + 1)
        patch.setattr(library, "_lock", None)
        with writer:
            pass
        library.leave([used])
    assert not other._index.evict_one()
    assert other.write(identity, ids, 1.0, wait_s=0.05) is None
    for each in (library, other):
        each.close()


def hanging(folder: Path, monkeypatch: pytest.MonkeyPatch, rules: list[FaultRule]) -> Library:
    """A library whose engine is closed at once."""
    monkeypatch.setattr(libraries, "_HELD", set())
    engine = FaultyEngine(rules)
    monkeypatch.setattr(engine, "close", partial(engine.close, 0.05))
    return opened(folder, engine=lambda: engine, deadline_s=0.2)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_busy_index_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """What it could not be told of an extent that came to nothing it is told by the next call."""
    rules = [FaultRule("never", operation="write", count=1)] if is_late else []
    library, other, ids = hanging(folder, monkeypatch, rules), opened(folder), ids_of(40)
    identity = Identity.of(SPACE, [], ids)
    writer = library.write(identity, ids, 1.0)
    assert isinstance(writer, ExtentWriter)

    def busy(number: int) -> None:
        raise errors.StoreBusyError("the index of a library is being changed")

    with monkeypatch.context() as patch:
        for name in ("abandon", "damage"):
            patch.setattr(library._index, name, busy)
        with contextlib.suppress(errors.DeadlineExceededError), writer:
            if is_late:
                writer.rows(0, *(rows[:, :, :16] for rows in rows_of(ids, 0)))
        assert library.stats()["late"] == 1
        assert other.write(identity, ids, 1.0, wait_s=0.05) is None
    assert library.stats()["late"] == is_late
    taken = other.write(identity, ids, 1.0, wait_s=0.05)
    assert isinstance(taken, ExtentWriter)
    with taken:
        pass
    for each in (library, other):
        each.close()


def test_closing_gives_up_what_is_being_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text may be written at once, by whoever wants it, in another place."""
    rules = [FaultRule("never", operation="write", count=1)]
    library, other, ids = hanging(folder, monkeypatch, rules), opened(folder), ids_of(40)
    identity = Identity.of(SPACE, [], ids)
    writer = library.write(identity, ids, 1.0)
    assert isinstance(writer, ExtentWriter)
    with pytest.raises(errors.DeadlineExceededError):
        writer.rows(0, *(rows[:, :, :16] for rows in rows_of(ids, 0)))
    library.close()
    assert len(libraries._HELD) == 1
    extent = filled(other, ids)
    assert extent is not None
    assert extent.offset_bytes == SHAPE.extent_bytes(40)
    other.close()


def test_rows_have_to_be_whole_blocks(folder: Path) -> None:
    library, ids = opened(folder), ids_of(40)
    writer = library.write(Identity.of(SPACE, [], ids), ids, 1.0)
    assert isinstance(writer, ExtentWriter)
    k, v = rows_of(ids, 0)
    with writer:
        for n in (15, 41):
            wide = [each.repeat(1, 1, 2, 1)[:, :, :n] for each in (k, v)]
            with pytest.raises(errors.InvalidInputError, match="whole blocks"):
                writer.rows(0, *wide)
    library.close()


@pytest.mark.parametrize("where", ["head", "sums", "packed", "rows", "end"])
def test_damage_is_found(folder: Path, where: str) -> None:
    library, ids = opened(folder), ids_of(20)
    extent = filled(library, ids)
    assert extent is not None
    library.leave([extent])
    front = SHAPE.front_bytes(20)
    at = {"head": 30, "sums": 140, "packed": 200, "rows": front + 5000, "end": front + 5000}[where]
    if where == "end":
        os.truncate(folder / DATA, front + 4096)
    else:
        with open(folder / DATA, "r+b") as file:
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ 4]))
    if where in ("head", "sums", "packed"):
        assert not found(library, ids)
    else:
        assert library.verify()[1] == 1
    assert not found(library, ids)
    assert filled(library, ids) is not None, "it is written anew"
    assert library.verify() == (SHAPE.extent_bytes(20), 0)
    library.close()


def test_a_full_disk_evicts_and_then_says_so(folder: Path) -> None:
    rules = [FaultRule(operation="allocate", path="*passages.bin", value=28, nth=3)]
    library = opened(folder, engine=lambda: FaultyEngine(rules))
    for seed in (1, 2):
        extent = filled(library, ids_of(20, seed), cost=float(seed))
        assert extent is not None
        library.leave([extent])
    with pytest.raises(errors.DiskFullError):
        filled(library, ids_of(20, 3))
    assert library.stats()["extents"] == 0
    library.close()


def test_names(folder: Path) -> None:
    library, a, b = opened(folder), ids_of(20, 1), ids_of(20, 2)
    for ids in (a, b):
        extent = filled(library, ids)
        assert extent is not None
        library.leave([extent])
    library.name("one", a)
    library.name("two", a)
    assert np.array_equal(library.named("one"), a)
    library.name("one", b)
    assert found(library, a), "it has a second name"
    library.name("two", b)
    assert not found(library, a)
    assert library.remove("one")
    assert found(library, b)
    assert library.remove("two")
    assert not found(library, b)
    assert not library.remove("two")
    assert library.named("two") is None
    library.close()


@pytest.mark.parametrize("content", [b"no database at all" * 300, b""])
def test_another_index(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    if content:
        with pytest.raises(errors.FormatError, match="damaged"):
            opened(folder)
    else:
        opened(folder).close()


def test_links_are_refused(folder: Path) -> None:
    (folder / "elsewhere").write_bytes(b"")
    (folder / DATA).symlink_to(folder / "elsewhere")
    with pytest.raises(errors.FormatError, match="plain file"):
        opened(folder)
