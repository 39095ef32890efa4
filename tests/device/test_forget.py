"""`forget` from another thread, at any moment: whoever attends gets its rows or a typed error, and
the device serves what is asked next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.device.rows.file import RowFileDevice
from espnx.storage import FaultRule, FaultyEngine
from tests.device.gpu.rows import WAYS, opened_gpu
from tests.device.rows import Seen, assert_right, attend, opened, put, queries
from tests.forks import Forks
from tests.storage.common import until

LAYOUT = RowLayout("fp16", 64, 64)
HEADS = range(2)


def opened_as(kind: str, folder: Path, **options: object) -> AbstractContextManager[RowFileDevice]:
    return opened(folder, **options) if kind == "ssd" else opened_gpu(folder, kind, **options)


def in_a_thread(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


def assert_serves(device: RowFileDevice, seen: list[Seen]) -> None:
    look = queries(LAYOUT, 1, len(HEADS), 1, torch.Generator().manual_seed(1))
    assert_right(attend(device, LAYOUT, seen, look), seen, look)
    assert device.front() == -1


@pytest.mark.parametrize("kind", ["ssd", *WAYS])
def test_while_rows_are_shown(kind: str, folder: Path) -> None:
    """Before the last read: an error. At the last one there is nothing left to call off, and what
    was asked for since stays."""
    with opened_as(kind, folder, read_ahead_bytes=1 << 20) as device:
        seen = [put(device, LAYOUT, 1, HEADS, 8000, torch.Generator())[0].use(0)]
        reads: list[int] = []
        device.visit(
            device.ahead(LAYOUT, [each.use for each in seen]),
            lambda memory, pieces: reads.append(len(pieces)),
        )
        assert len(reads) > 3

        for at in (1, 2, len(reads) - 1, len(reads)):
            count, asked = 0, list[int]()

            def look(memory: torch.Tensor, pieces: np.ndarray) -> None:
                nonlocal count
                count += 1
                if count == at:  # noqa: B023
                    in_a_thread(device.forget)
                    asked.append(device.ahead(LAYOUT, [each.use for each in seen]))  # noqa: B023

            ticket = device.ahead(LAYOUT, [each.use for each in seen])
            if at < len(reads):
                with pytest.raises(errors.TransferCancelledError):
                    device.visit(ticket, look)
            else:
                device.visit(ticket, look)
            assert count == at
            assert device.front() == asked[0], "what was asked for after the call is in line"
            device.visit(asked[0], lambda memory, pieces: None)
            assert_serves(device, seen)


@pytest.mark.parametrize("kind", ["ssd", "direct", "bounce"])
def test_wakes_whoever_waits(kind: str, folder: Path) -> None:
    engine = FaultyEngine([FaultRule("never", operation="read", nth=2, count=1)])
    with opened_as(kind, folder, engine=engine, read_ahead_bytes=2 << 20) as device:
        seen = [put(device, LAYOUT, 1, HEADS, 8000, torch.Generator())[0].use(0)]
        ends, begun = list[BaseException](), Event()
        ticket = device.ahead(LAYOUT, [each.use for each in seen])

        def work() -> None:
            try:
                device.visit(ticket, lambda memory, pieces: begun.set())
            except errors.EspnxError as error:
                ends.append(error)

        thread = Thread(target=work)
        thread.start()
        assert until(lambda: engine.stats().fault_hits == 1)
        begun.wait()
        device.forget()
        thread.join()
        assert [type(error) for error in ends] == [errors.TransferCancelledError]
        assert_serves(device, seen)
    engine.close(grace_s=0.05)


INTERRUPTED = """
import os, signal, threading
from espnx.device import workers
from pathlib import Path
import torch
import espnx.kv.striping
from espnx.kv.striping import StripedDevices
from espnx.device.rows.ssd import SsdRowDevice
from espnx.storage import FaultRule, FaultyEngine
from tests.device.rows import assert_right, draw, queries
from tests.kv.test_striping import LAYOUT, seen_of, uses_of

signal.signal(signal.SIGINT, signal.default_int_handler)
engines = [FaultyEngine([FaultRule("never", operation="read", count=1)]) for _ in range(3)]
attending, interrupters = threading.Semaphore(0), []

class Device(SsdRowDevice):
    def attend(self, ticket, queries, tail=None):
        attending.release()
        return super().attend(ticket, queries, tail)

striped = StripedDevices(3, lambda i, _: Device(Path.cwd() / str(i), engine=engines[i]))
striped.open(torch.device("cpu"))
k, v = draw(LAYOUT, 2, range(3), 900, torch.Generator())
parts = striped.put(LAYOUT, k, v)
look = queries(LAYOUT, 2, 3, 1, torch.Generator())

def interrupt():
    for _ in engines:
        attending.acquire()
    os.kill(os.getpid(), signal.SIGINT)

def wait(jobs):
    if not interrupters:
        interrupters.append(threading.Thread(target=interrupt))
        interrupters[0].start()
    return workers.wait(jobs)

espnx.kv.striping.wait = wait
try:
    striped.attend(striped.ahead(LAYOUT, uses_of(parts, [900, 900], 3)), look, None)
except KeyboardInterrupt:
    print("interrupted")
assert [device.front() for device in striped.devices] == [-1] * 3
tickets = striped.ahead(LAYOUT, uses_of(parts, [900, 900], 3))
assert_right(striped.attend(tickets, look, None), seen_of(LAYOUT, k, v, [900, 900], 3), look)
striped.close()
for engine in engines:
    engine.close(grace_s=0.05)
print("usable")
"""


def test_ctrl_c_while_several_directories_attend(
    folder: Path, open_forks: Callable[[str], Forks]
) -> None:
    """Each of them waits for a read that never comes."""
    out, err = folder / "stdout", folder / "stderr"
    run = open_forks("tests.doc_examples").run
    assert run(text=INTERRUPTED, cwd=folder, stdout=out, stderr=err) == 0, err.read_text()
    assert out.read_text().split() == ["interrupted", "usable"]
