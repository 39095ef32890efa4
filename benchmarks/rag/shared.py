"""``--show shared``: many questions at once behind the same passages, whose rows are read once for
all of them."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import espnx
from espnx.device.trace.reader import read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.writer import TraceWriter
from espnx.integrations.transformers.passages.passage_kv import PassageKV

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import Sample, compare
from ..kv.fleet import folder_in
from ..kv.measure import judge_step
from ..kv.resume import text_tokens
from ..kv.systems.models import tolerance_of_other_shapes
from ..machine.counters import read_counters
from .memory import computed, joined
from .options import PREFIX_TOKENS, QUESTION_TOKENS, Opened, Options

PASSAGES, PASSAGE_TOKENS, REQUESTS = 8, 128, 16
TOGETHER, ONE_BY_ONE, ROTATED = "together", "one-by-one", "keys-rotated"


class SharedWork:
    """Passages in a library and in memory, and questions behind them. Every turn asks others."""

    def __init__(self, opened: Opened, storage: Path, turns: int, requests: int):
        self.model, self.storage = opened.model, storage
        n = PREFIX_TOKENS + PASSAGES * PASSAGE_TOKENS
        tokens = text_tokens(opened.tokenizer, n + turns * requests * QUESTION_TOKENS)
        self.prefix = tokens[:PREFIX_TOKENS]
        passages = tokens[PREFIX_TOKENS:n].split(PASSAGE_TOKENS)
        self.questions = tokens[n:].view(turns, requests, QUESTION_TOKENS)
        self.kv = self.library()
        try:
            self.keys = [self.kv.add(each) for each in passages]
            self.rows = computed(self.model, self.prefix, passages)
            with self.kv.compose(self.keys[:1]) as cache:
                self.effective_path = str(cache.stats()["effective_path"])
        except BaseException:
            self.kv.close()
            raise
        self.row_bytes = sum(k.nbytes + v.nbytes for part in self.rows for k, v in part)
        self.logits = dict[tuple[str, int], torch.Tensor]()

    def library(self, **options: Any) -> PassageKV:
        return PassageKV(self.model, self.storage / "library", prefix=self.prefix, **options)

    @torch.inference_mode()
    def run(self, name: str, turn: int) -> dict[str, float]:
        """Answers all questions of a turn by their first token."""
        asked = self.questions[turn]
        # what is in memory is filled before; that composes is measured
        cache = self.in_memory(len(asked)) if name == ROTATED else None
        before, begun, asked_bytes = read_counters(), time.perf_counter(), 0
        found = list[torch.Tensor]()
        for part in asked.split(1 if name == ONE_BY_ONE else len(asked)):
            if cache is not None:
                found.append(self.first_of(part, cache))
                continue
            with self.kv.compose(self.keys, question_tokens=part.numel()) as composed:
                found.append(self.first_of(part, composed))
                asked_bytes += composed.reused["bytes"]
        seconds, spent = time.perf_counter() - begun, read_counters() - before
        self.logits[name, turn] = torch.cat(found)
        moved = asked_bytes if spent.device_read_bytes is None else spent.device_read_bytes
        return {
            "seconds": seconds,
            "cpu_s": spent.cpu_s,
            "asked_bytes": asked_bytes,
            "bytes_moved": 0 if name == ROTATED else moved,
        }

    def first_of(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of the last token, [sequences, vocabulary]."""
        logits = self.model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        logits.argmax(-1).tolist()
        return torch.as_tensor(logits)

    def in_memory(self, sequences: int) -> Any:
        cache = joined(self.model, self.rows, has_prefix=True)
        cache.batch_repeat_interleave(sequences)
        return cache

    def problem(self, name: str) -> str | None:
        """What is wrong with any first token of a system, beside the same blocks in memory."""
        tolerance = tolerance_of_other_shapes(self.model.config, "fp32")
        for (known, turn), mine in self.logits.items():
            theirs = self.logits.get((ROTATED, turn))
            if known != name or theirs is None:
                continue
            one = judge_step(
                theirs.float().numpy(), mine.argmax(-1).numpy(), mine.float().numpy(), tolerance
            )
            if one.problem:
                return f"turn {turn}: {one.problem}"
        return None

    def reads_of_a_layer(self) -> tuple[int, int, int]:
        """(least, most times that attention took one passage's rows of one layer in a pass of all
        questions; bytes whose reads were in line and were forgotten, because more queries came than
        were expected), by a trace of what the device was asked."""
        folder = self.storage / "library"
        devices = espnx.device.open("ssd", [folder])
        file = self.storage / "shared.trace"
        with (
            TraceWriter(file, "shared", devices) as writer,
            self.library(device=recorded(devices, writer)) as kv,
            kv.compose(self.keys, question_tokens=self.questions[0].numel()) as cache,
            torch.inference_mode(),
        ):
            self.first_of(self.questions[0], cache)
        commands = sorted(read_trace(file).commands, key=lambda each: each.number)
        ahead = {each.detail.whole("ticket"): each for each in commands if each.verb == "ahead"}
        used = [each.detail.whole("ticket") for each in commands if each.verb == "attend"]
        taken = Counter[int]()
        for ticket in used:
            taken.update(view[0] for view in ahead[ticket].detail.values()["views"])
        # reads in line behind the last one that was used are for a token that would come next
        begun = next((each.number for each in commands if each.verb == "attend"), 0)
        forgotten = sum(
            each.size_bytes
            for ticket, each in ahead.items()
            if ticket not in used and each.number < begun
        )
        return min(taken.values(), default=0), max(taken.values(), default=0), forgotten


class SharedSystem:
    """A way to answer all questions, for the runner."""

    def __init__(self, name: str, work: SharedWork):
        self.name = self.group = name
        self.requested_path = self.effective_path = (
            "memory" if name == ROTATED else work.effective_path
        )
        self._work, self._turn = work, 0

    def verify(self) -> str | None:
        if self.name == ROTATED:
            return None  # what the others are compared with
        for name in (ROTATED, self.name):
            self._work.run(name, 0)
        return self._work.problem(self.name)

    def prepare(self, turn: int) -> str:
        self._turn = turn + 1
        gc.collect()
        is_cold = self.name != ROTATED and "buffered" not in self.effective_path
        return "cold" if is_cold else "warm"

    def run(self) -> Sample:
        answer = self._work.run(self.name, self._turn)
        metrics = {
            "first_token_s": answer["seconds"],
            "cpu_s": answer["cpu_s"],
            "asked_over_rows": answer["asked_bytes"] / self._work.row_bytes,
        }
        size = self._work.row_bytes
        return Sample(answer["seconds"], size, int(answer["bytes_moved"]), metrics)

    def close(self) -> None:
        pass


def show_shared(options: Options, opened: Opened, say: Say) -> list[Row]:
    """One point. `asked_over_rows`: bytes that attention asked for over those of all rows;
    `reads_least`, `reads_most`, `forgotten_bytes`: see `SharedWork.reads_of_a_layer`."""
    requests = 4 if options.quick else REQUESTS
    with folder_in(options.path) as folder:
        work = SharedWork(opened, Path(folder), options.pairs + 1, requests)
        with work.kv:
            params = {
                "show": "shared",
                "model": opened.name,
                "dtype": "fp32",
                "tokens": PASSAGES * PASSAGE_TOKENS,
                "passage_tokens": PASSAGE_TOKENS,
                "requests": requests,
                "question_tokens": QUESTION_TOKENS,
            }
            systems = [SharedSystem(name, work) for name in (TOGETHER, ONE_BY_ONE, ROTATED)]
            rows = compare(
                "rag",
                params,
                systems[:1],
                systems[1:],
                pairs=options.pairs,
                seed=options.seed,
                say=say,
            )
            least, most, forgotten = work.reads_of_a_layer()
    say(
        f"    rows of a passage in a layer are taken {least} to {most} times; "
        f"{forgotten:,} bytes were in line and forgotten"
    )
    counted = {"reads_least": least, "reads_most": most, "forgotten_bytes": forgotten}
    found = list[Row]()
    for row in rows:
        if row.system == TOGETHER:
            row = dataclasses.replace(row, metrics={**row.metrics, **counted})
        if row.median_s is not None:
            say(f"    {row.system}: {row.median_s:.3f} s for {requests} questions")
        found.append(row)
    return found
