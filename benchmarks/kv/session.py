"""What a process of the KV benchmark does: opens a system, fills its cache, and decodes when it is
told to."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from espnx.errors import InvalidInputError
from espnx.kv.cache import trim_heap

from ..machine import page_cache
from ..machine.counters import read_counters
from ..machine.memory import status_bytes
from .attend import AttendWork
from .resume import ResumeWork
from .rss import reset_peak, resident_bytes
from .speculation.work import SpeculationWork
from .systems.caches import Decoder, EspnxDecoder, HFDecoder, open_decoder
from .systems.models import Task
from .x_rows import XWork

Answer = dict[str, Any]
_SAMPLE_S = 0.005
_TOUCHED_TOKENS = 256


class Session:
    """Commands by name; each returns what goes back as JSON."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None
        self._done = 0

    def handle(self, command: dict[str, Any]) -> Answer:
        arguments = dict(command)
        name = arguments.pop("do")
        answer: Answer = getattr(self, f"do_{name}")(**arguments)
        return answer

    @property
    def decoder(self) -> Decoder:
        if self._decoder is None:
            raise InvalidInputError("a command came before `open`")
        return self._decoder

    def do_open(
        self, kind: str, task: dict[str, Any], weights: str, storage: str, options: dict[str, Any]
    ) -> Answer:
        self._task = Task(**task)
        self._tokens = self._task.tokens()
        self._storage = os.path.realpath(storage)
        self._decoder = open_decoder(kind, self._task, Path(weights), Path(storage), options)
        return {"effective_path": self._decoder.effective_path}

    def do_seed(self) -> Answer:
        self.decoder.seed()
        for path in self.decoder.files():
            page_cache.drop(path)
        return {"predicted_s": self.decoder.predicted_s()}

    def do_residency(self) -> Answer:
        """The part of the files behind the page cache that is in memory."""
        files = self.decoder.files()
        sizes = [path.stat().st_size for path in files]
        held = sum(
            size * page_cache.resident_fraction(path)
            for size, path in zip(sizes, files, strict=True)
        )
        return {"fraction": held / sum(sizes) if files else 0.0}

    def do_rows_file(self) -> Answer:
        """Says where another process finds the largest file that this one keeps rows in, though it
        has no name, and its bytes up to the first hole. No path where there is none."""
        storage, found = f"{self._storage}{os.sep}", dict[str, int]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if os.readlink(f"/proc/self/fd/{name}").startswith(storage):
                    found[name] = os.fstat(int(name)).st_size
        if not found or not max(found.values()):
            return {"path": None, "written_bytes": 0}
        name = max(found, key=lambda each: found[each])
        # What is reserved and not yet written counts as a hole: no device is asked for it.
        with open(f"/proc/self/fd/{name}", "rb") as file:
            return {
                "path": f"/proc/{os.getpid()}/fd/{name}",
                "written_bytes": os.lseek(file.fileno(), 0, os.SEEK_HOLE),
            }

    def do_warm_up(self, count: int, keep: list[int], folder: str) -> Answer:
        """Does as `steps`, and says how much memory of its own the process had at most."""
        with sampled(anonymous_bytes) as peak:
            answer = self.do_steps(count, keep, folder)
        if isinstance(self.decoder, EspnxDecoder):
            self.decoder.steps.forget()
        return {**answer, "peak_bytes": max(peak)}

    def do_steps(self, count: int, keep: list[int], folder: str) -> Answer:
        """Decodes `count` tokens of each sequence. The logits of the steps in `keep` go into files,
        outside of the measured time."""
        decoder, kept, chosen = self.decoder, list[tuple[int, torch.Tensor]](), list[list[int]]()
        decoder.rest()
        own, before = decoder.counters(), read_counters()
        counted = (
            decoder.steps.step() if isinstance(decoder, EspnxDecoder) else contextlib.nullcontext()
        )
        begin = time.perf_counter()
        with counted:
            for number in range(self._done, self._done + count):
                ids, logits = decoder.step(self._tokens[number])
                chosen.append(ids.tolist())
                if logits is not None and number in keep:
                    kept.append((number, logits))
        seconds = time.perf_counter() - begin
        spent, after = read_counters() - before, decoder.counters()
        for number, logits in kept:
            np.save(os.path.join(folder, f"{number}.npy"), logits.float().numpy())
        self._done += count
        return {
            "seconds": seconds,
            "ids": chosen,
            "cpu_s": spent.cpu_s,
            "read_bytes": spent.device_read_bytes,
            "written_bytes": spent.device_written_bytes,
            "own": {name: after[name] - own[name] for name in after},
            "stored_bytes": after.get("stored_bytes", 0),
            "x_rows": int(after.get("x_rows", 0)),
        }

    # --- memory ---

    def do_touch(self) -> Answer:
        """Brings the weights and the framework's code into memory, so that what comes later is the
        cache's."""
        model = cast(HFDecoder, self.decoder).model
        with torch.inference_mode():
            model(
                input_ids=self._tokens[:1].T.expand(-1, _TOUCHED_TOKENS),
                use_cache=False,
                logits_to_keep=1,
            )
        gc.collect()
        # as after each chunk of a prompt: what it holds itself, without the holes of its heap
        trim_heap()
        return {"now": resident_bytes()[0]}

    def do_reset_peak(self) -> Answer:
        reset_peak()
        return {}

    def do_peak(self) -> Answer:
        return {"peak": resident_bytes()[1]}

    def do_prefill(self, chunk: int) -> Answer:
        """Feeds the task's context, random tokens, in chunks."""
        decoder, task = cast(HFDecoder, self.decoder), self._task
        before, begin, chunks = read_counters(), time.perf_counter(), list[Answer]()
        with torch.inference_mode():
            for part in task.prompt().split(chunk, dim=1):
                decoder.model(
                    input_ids=part, past_key_values=decoder.cache, use_cache=True, logits_to_keep=1
                )
                read = (read_counters() - before).device_read_bytes
                chunks.append(
                    {
                        "seconds": time.perf_counter() - begin,
                        "read_bytes": read,
                        "resident_bytes": resident_bytes()[0],
                    }
                )
        seconds, spent = time.perf_counter() - begin, read_counters() - before
        stored = decoder.counters().get("stored_bytes", 0)
        return {
            "seconds": seconds,
            "read_bytes": spent.device_read_bytes,
            "stored_bytes": stored,
            "chunks": chunks,
        }

    # --- attention from memory ---

    def do_attend_open(self, kind: str, **words: Any) -> Answer:
        self._attend: AttendWork | XWork = XWork(**words) if kind == "x" else AttendWork(**words)
        return {}

    def do_attend_check(self, name: str) -> Answer:
        return {"problem": self._attend.check(name)}

    def do_attend_run(self, name: str) -> Answer:
        return {"seconds": self._attend.run(name), "bytes_asked": self._attend.bytes_asked}

    # --- time to first token ---

    def do_resume_open(self, **words: Any) -> Answer:
        self._resume = ResumeWork(**words)
        return {"is_text": self._resume.is_text}

    def do_resume_fill(self, context: int) -> Answer:
        return self._resume.fill(context)

    def do_resume_run(self, name: str, turn: int) -> Answer:
        return self._resume.run(name, turn)

    def do_resume_verdict(self, name: str) -> Answer:
        # one level down: an answer with `error` is a failure
        return {"verdict": self._resume.verdict(name)}

    # --- several tokens from a pass ---

    def do_speculation_open(self, **words: Any) -> Answer:
        self._speculation = SpeculationWork(**words)
        return {}

    def do_speculation_fill(self, **words: Any) -> Answer:
        return self._speculation.fill(**words)

    def do_speculation_run(self, **words: Any) -> Answer:
        return self._speculation.run(**words)

    def do_speculation_verdict(self, name: str) -> Answer:
        return {"verdict": self._speculation.verdict(name)}

    def do_speculation_forced(self, name: str, text: str) -> Answer:
        return self._speculation.forced(name, text)

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()


def anonymous_bytes() -> int:
    """Memory that this process allocated; no page cache, and not the weights, which processes
    share."""
    return status_bytes().get("RssAnon", 0)


@contextlib.contextmanager
def sampled(look: Callable[[], int]) -> Iterator[list[int]]:
    """What `look` returned every few milliseconds."""
    seen, ended = [look()], threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            seen.append(look())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        seen.append(look())
