"""Reads that begin before a prompt is composed: what they hide, what they cost, and that nothing
else changes. Time is counted by a device whose reads take as long as their bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.kv.passages.library import DATA
from espnx.storage import NativeEngine
from tests.integrations.transformers.passages.families import (
    blocks_in_memory,
    enabled,
    log_probabilities,
    plain,
    words,
)

BEFORE, QUESTION = words(32, 1), words(12, 5)
PASSAGES = [words(n, 40 + n) for n in (64, 48, 80, 33, 96, 112)]
BYTES_PER_S = 1e6
#: 3 layers of 2 heads of 64 + 64 values in fp32.
TOKEN_BYTES = 3 * 2 * 128 * 4


class SlowFuture:
    """A read whose bytes are there when its device's time has come."""

    def __init__(self, device: SlowDevice, future: Any, size: int, priority: int):
        self._device, self._future, self.size, self.begun_s = device, future, size, device.now_s
        self.priority = priority
        self.is_served = False

    def done(self) -> bool:
        self._device.serve(0.0)
        return self.is_served

    def wait(self) -> torch.Tensor:
        while not self.is_served:
            self._device.serve_one()
        return self._future.wait()

    def cancel(self) -> None:
        self._device.drop(self)
        self._future.cancel()


class SlowDevice(NativeEngine):
    """Serves one read after the other, the urgent ones first, in the time that its bytes take;
    those that are cancelled before their turn take none."""

    def __init__(self) -> None:
        super().__init__("posix", pool_bytes=1 << 20)
        self.now_s = self._free_s = 0.0
        self._queue = list[SlowFuture]()

    def read(self, plan: Any, out: Any = None, **more: Any) -> Any:
        self.serve(0.0)
        future, size = super().read(plan, out, **more), int(plan.size_bytes.sum())
        made = SlowFuture(self, future, size, more.get("priority", 0))
        first = int(bool(self._queue) and self._free_s < self.now_s)  # is being served
        behind = [
            i for i in range(first, len(self._queue)) if self._queue[i].priority < made.priority
        ]
        self._queue.insert(min(behind, default=len(self._queue)), made)
        return made

    def _end_s(self, read: SlowFuture) -> float:
        return max(self._free_s, read.begun_s) + read.size / BYTES_PER_S

    def serve(self, seconds: float) -> None:
        """Time goes by."""
        self.now_s += seconds
        while self._queue and self._end_s(self._queue[0]) <= self.now_s:
            read = self._queue.pop(0)
            self._free_s, read.is_served = self._end_s(read), True

    def serve_one(self) -> None:
        """Time goes by until the next read has ended."""
        self.serve(max(self._end_s(self._queue[0]) - self.now_s, 0.0) + 1e-12)

    def served_s(self, wanted: set[Any]) -> float:
        """How long the read whose turn it is has been served, if it is one of these."""
        begun_s = max(self._free_s, self._queue[0].begun_s) if self._queue else 0.0
        return self.now_s - begun_s if self._queue and self._queue[0] in wanted else 0.0

    def drop(self, read: SlowFuture) -> None:
        """A read is not wanted any more."""
        self.serve(0.0)
        is_first = bool(self._queue) and self._queue[0] is read
        if read in self._queue and not (is_first and self._free_s < self.now_s):
            self._queue.remove(read)


def exact(chosen: list[int]) -> torch.Tensor:
    passages = [PASSAGES[i] for i in chosen]
    cache = blocks_in_memory(plain("llama"), BEFORE, passages)
    first = 32 + sum(map(len, passages))
    return log_probabilities(plain("llama"), QUESTION, cache, first)


def given(kv: PassageKV, cache: Any) -> torch.Tensor:
    return log_probabilities(kv.model, QUESTION, cache, cache.composed_tokens)


@pytest.fixture
def kv(folder: Path) -> Iterator[PassageKV]:
    made = list[SlowDevice]()

    def engine() -> SlowDevice:
        made.append(SlowDevice())
        return made[-1]

    with PassageKV(enabled("llama"), folder, prefix=BEFORE, engine=engine) as opened:
        for number, each in enumerate(PASSAGES):
            opened.add(each, key=str(number))
        yield opened


def device_of(kv: PassageKV) -> SlowDevice:
    engine = kv._library.engine
    assert isinstance(engine, SlowDevice)
    return engine


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0, 3.0])
def test_reads_are_hidden_behind_retrieval(kv: PassageKV, share: float) -> None:
    """At least four fifths of what the device could read between the first candidates and the final
    list, one of which was another, are there when the prompt is composed."""
    final, device = [4, 1, 0, 2], device_of(kv)
    blocks = (32 + 96 + 48 + 64 + 80) * TOKEN_BYTES
    with kv.prefetch(["4", "1", "5", "0"]) as prefetch:
        begun = device.now_s
        device.serve(share / 2 * blocks / BYTES_PER_S)
        assert prefetch.want(["4", "1", "0", "2"])
        device.serve(share / 2 * blocks / BYTES_PER_S)
        window_s = device.now_s - begun
        with kv.compose([str(i) for i in final], prefetch=prefetch) as cache:
            under_way_s = device.served_s({each.future for each in prefetch.early._reads.values()})
            reused = cache.reused
            found = given(kv, cache)
            used = prefetch.early.used_bytes
            assert cache.reused["wasted"] == reused["wasted"]
    hidden_s = reused["hidden"] / BYTES_PER_S + under_way_s
    assert hidden_s >= 0.8 * min(window_s, blocks / BYTES_PER_S) or not share
    if share == 3.0:
        assert reused["hidden"] == used == blocks
    assert reused["wasted"] <= used / 2
    assert float((found - exact(final)).abs().max()) <= 1e-4


def test_bytes_have_a_bound(kv: PassageKV) -> None:
    """In memory at a time, and in all; first layers come first."""
    most, device = 300_000, device_of(kv)
    with kv.prefetch(["0", "1"], max_bytes=most) as prefetch:
        early = prefetch.early
        layer = 32 * TOKEN_BYTES // 3
        order = list(early._reads)
        assert [number for _, number in order] == sorted(number for _, number in order)
        assert prefetch.started_bytes <= most
        assert early._held_bytes >= most - 2 * layer - 64 * TOKEN_BYTES // 3
        for wanted in (["2", "3"], ["4", "5"], ["0", "1"], ["2", "5"], ["1"]):
            device.serve(0.05)
            prefetch.want(wanted)
            assert early._held_bytes <= most
            assert prefetch.started_bytes <= 1.5 * most
        with kv.compose(["2", "3"], prefetch=prefetch) as cache:
            assert float((given(kv, cache) - exact([2, 3])).abs().max()) <= 1e-4


def test_what_misses_is_given_up(kv: PassageKV, folder: Path) -> None:
    """Names that nobody gave, texts that are not there, a prompt without any of them; and nothing
    stays in use."""
    with kv.prefetch(["nobody", words(50, 99), "0", words(0, 1)]) as prefetch:
        with kv.compose(["3"], prefetch=prefetch) as cache:
            assert cache.reused["wasted"] == 64 * TOKEN_BYTES
            assert float((given(kv, cache) - exact([3])).abs().max()) <= 1e-4
        assert not prefetch.want(["1"]) or not prefetch.early._reads, "it is over"
    with kv.prefetch(["1", "2"]) as prefetch:
        assert prefetch.started_bytes > 0
    assert prefetch.wasted_bytes == prefetch.started_bytes
    dropped = kv.prefetch(["4"])
    del dropped
    assert not kv._library._pins._used
    with pytest.raises(errors.InvalidInputError, match="many"):
        kv.prefetch(["1"], max_bytes="many")


def test_nobody_waits_for_a_prompt_that_is_computed(kv: PassageKV) -> None:
    found = list[bool]()
    with kv.prefetch() as prefetch, kv._lock:
        thread = threading.Thread(target=lambda: found.append(prefetch.want(["1"])))
        thread.start()
        thread.join(30)
    assert found == [False]


def test_damage_is_found_all_the_same(kv: PassageKV, folder: Path) -> None:
    with kv.prefetch(["0", "1", "2"]) as prefetch:
        extent = next(
            each for each in prefetch.early.extents.values() if each.identity.tokens == 48
        )
    with open(folder / DATA, "r+b") as file:
        file.seek(extent.offset_bytes + extent.size_bytes - 4096)
        file.write(b"damage")
    with (
        kv.prefetch(["0", "1", "2"]) as prefetch,
        kv.compose(["1", "0"], prefetch=prefetch) as cache,
    ):
        assert float((given(kv, cache) - exact([1, 0])).abs().max()) <= 1e-4
        assert cache.reused["damaged"] == 1


@pytest.mark.parametrize("options", [{"repair": 8}, {"blend": 0.2}])
def test_prefetched_rows_may_be_hidden(kv: PassageKV, options: dict[str, Any]) -> None:
    with kv.compose(["0", "3", "2"], **options) as cache:
        wanted = given(kv, cache)
    with kv.prefetch(["0", "3", "2"]) as prefetch:
        device_of(kv).serve(10)
        with kv.compose(["0", "3", "2"], prefetch=prefetch, **options) as cache:
            assert float((given(kv, cache) - wanted).abs().max()) <= 1e-4
            assert cache.reused["wasted"] == 0


def test_several_directories(folder: Path) -> None:
    """Passages lie on either; reads of both are under way together."""
    folders = [folder / "a", folder / "b"]
    for turn in range(2):
        with PassageKV(enabled("llama"), folders, prefix=BEFORE) as kv:
            with (
                kv.prefetch([PASSAGES[0]]) as prefetch,
                kv.compose(PASSAGES[:4], prefetch=prefetch) as cache,
            ):
                assert float((given(kv, cache) - exact([0, 1, 2, 3])).abs().max()) <= 1e-4
                assert cache.reused["computed"] == (0 if turn else 257)
                asked = [device.stats().bytes_asked for device in cache._context._devices]
                assert len(asked) == 2
                assert min(asked) > 0
            extent = next(
                each for each in cache._context.passages if each.extent and each.extent.directory
            ).extent
            assert extent is not None
            with kv.compose(PASSAGES[:4]) as cache:
                cache._context.forget()
                with open(folders[1] / "passages-1.bin", "r+b") as file:
                    file.seek(extent.offset_bytes + extent.size_bytes - 4096)
                    file.write(b"damage")
                assert float((given(kv, cache) - exact([0, 1, 2, 3])).abs().max()) <= 1e-4
                assert cache.reused["damaged"] == 1
