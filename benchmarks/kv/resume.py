"""Time to first token of a question about a context that was read before: computed anew, with its K
and V kept on SSD, or kept in RAM."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoTokenizer, DynamicCache

from espnx.errors import StateError
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.sizes import format_size

from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import Sample, compare
from ..machine.counters import read_counters
from ..machine.throttle import throttled
from .fleet import folder_in, scratch_parent
from .measure import Verdict, judge_step, judged
from .options import Options
from .systems.models import Task, load_model, tolerance_of_other_shapes, write_weights

QUESTION_TOKENS = 32
_FOLLOWING = 8  # tokens behind the first that are compared before anything is measured
RECOMPUTED, KEPT, IN_RAM = "recomputed", "espnx-kept", "kept-in-ram"
_SETTLE_S = 0.5  # a throttle grants in slices of 0.1 s


def text_tokens(tokenizer: Any, count: int) -> torch.Tensor:
    """int64 [count]: Python's own reference, which every machine has, again from its beginning
    where it is too short."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.from_numpy(
        np.resize(
            np.array(tokenizer(text[: 16 * count], verbose=False)["input_ids"], dtype=np.int64),
            count,
        )
    )


class ResumeWork:
    """A worker's model, a context, and the three ways to the first token of an answer. Every turn
    asks another question.

    Args:
        task: `context` is the longest; its steps are the turns.
        weights, storage: directories.
        options: of the cache.
    """

    def __init__(
        self, task: Mapping[str, Any], weights: str, storage: str, options: Mapping[str, Any]
    ):
        self.task = Task(**task)
        self.model = load_model(Path(weights), self.task.dtype)
        enable_kv_cache(self.model)
        self.storage, self.options = storage, dict(options)
        length = self.task.context + self.task.steps * QUESTION_TOKENS
        count = self.task.batch * length
        self.is_text = (Path(weights) / "tokenizer.json").exists()
        if self.is_text:
            tokens = text_tokens(
                AutoTokenizer.from_pretrained(weights, local_files_only=True), count
            )
        else:
            tokens = torch.randint(
                2,
                int(self.task.config["vocab_size"]),
                (count,),
                generator=torch.Generator().manual_seed(self.task.seed),
            )
        self.tokens = tokens.view(self.task.batch, length)

    @torch.inference_mode()
    def fill(self, context: int) -> dict[str, Any]:
        """Reads the context once into memory and once into a kept cache, and answers the first
        question in memory, for comparison."""
        self.context, self.logits = context, dict[str, dict[int, list[torch.Tensor]]]()
        self.in_ram = DynamicCache(config=self.model.config)
        first = self._pass(self._prompt(0), self.in_ram)
        self.answer = list[torch.Tensor]()  # what the reference says, fed to all
        logits = [first, *self._follow(self.in_ram, first)]
        self.logits[RECOMPUTED] = {0: logits}
        self.in_ram.crop(context - self.in_ram.get_seq_length())
        with self._kept() as cache:
            self._pass(self._prompt(0)[:, :context], cache)
        return {"effective_path": str(cache.stats()["effective_path"])}

    def _prompt(self, turn: int) -> torch.Tensor:
        """int64 [batch, context + question]."""
        begin = self.task.context + turn * QUESTION_TOKENS
        return torch.cat(
            [self.tokens[:, : self.context], self.tokens[:, begin : begin + QUESTION_TOKENS]], dim=1
        )

    def _kept(self) -> KVCache:
        return KVCache(
            self.model.config, self.storage, name=f"context-{self.context}", **self.options
        )

    def _pass(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of the last token, [batch, vocabulary]."""
        return self.model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]

    def _follow(self, cache: Any, first: torch.Tensor) -> list[torch.Tensor]:
        """Logits behind the first: all systems are fed the reference's tokens, so that each step
        can be compared."""
        found = list[torch.Tensor]()
        for step in range(_FOLLOWING):
            if len(self.answer) == step:
                self.answer.append((found[-1] if found else first).argmax(-1))
            found.append(self._pass(self.answer[step][:, None], cache))
        return found

    @torch.inference_mode()
    def run(self, name: str, turn: int) -> dict[str, Any]:
        """One turn. In the first, the tokens behind the first one are computed too, outside the
        measured time."""
        ids = self._prompt(turn)
        with contextlib.ExitStack() as stack:
            # A new process would look at every weight before it takes a kept cache up: so does
            # every turn.
            stack.enter_context(
                mock.patch.dict(
                    "espnx.integrations.transformers.identity.fingerprint._known", clear=True
                )
            )
            before, begun = read_counters(), time.perf_counter()
            if name == KEPT:
                cache: Any = stack.enter_context(self._kept())
                known = cache.reuse_prefix(ids)
            else:
                cache = self.in_ram if name == IN_RAM else DynamicCache(config=self.model.config)
                known = cache.get_seq_length()
            if known != (0 if name == RECOMPUTED else self.context):
                raise StateError(
                    f"{name} of the benchmark",
                    got=f"{known} tokens that are there already",
                    expected=self.context,
                )
            first = self._pass(ids[:, known:], cache)
            first.argmax(-1).tolist()
            seconds, spent = time.perf_counter() - begun, read_counters() - before
            stats = cache.stats() if name == KEPT else {}
            self.logits.setdefault(name, {})[turn] = [
                first,
                *(self._follow(cache, first) if not turn else []),
            ]
            if name != RECOMPUTED:
                cache.crop(self.context - cache.get_seq_length())
        return {
            "seconds": seconds,
            "cpu_s": spent.cpu_s,
            "read_bytes": spent.device_read_bytes,
            "computed_tokens": ids.shape[1] - known,
            "bytes_moved": stats.get("bytes_moved", 0),
        }

    def verdict(self, name: str) -> dict[str, Any]:
        """Every logit that was computed beside that of the same turn computed anew: the fields of a
        `Verdict`."""
        found, tolerance = (
            list[Verdict](),
            tolerance_of_other_shapes(self.model.config, self.task.dtype),
        )
        for turn, logits in self.logits.get(name, {}).items():
            for step, (mine, theirs) in enumerate(
                zip(logits, self.logits[RECOMPUTED][turn], strict=True)
            ):
                one = judge_step(
                    theirs.float().numpy(), mine.argmax(-1).numpy(), mine.float().numpy(), tolerance
                )
                found.append(
                    one
                    if one.problem is None
                    else dataclasses.replace(
                        one, problem=f"turn {turn}, token {step}: {one.problem}"
                    )
                )
        return {
            "problem": next((one.problem for one in found if one.problem), None),
            "same": float(np.mean([one.same for one in found])),
            "error": max(one.error for one in found if one.error is not None),
        }


class ResumeSystem:
    """A way to the first token, for the runner."""

    def __init__(self, name: str, worker: Worker, kv_bytes: int, effective_path: str):
        self.name = self.group = name
        self.requested_path = self.effective_path = effective_path
        self._worker, self._kv_bytes, self._turn = worker, kv_bytes, 0

    def verify(self) -> str | None:
        if self.name == RECOMPUTED:
            return None  # what the others are compared with
        self._worker.ask("resume_run", name=self.name, turn=0)
        return Verdict(**self._worker.ask("resume_verdict", name=self.name)["verdict"]).problem

    def prepare(self, turn: int) -> str:
        self._turn = turn + 1
        return "cold" if self.name == KEPT and "buffered" not in self.effective_path else "warm"

    def run(self) -> Sample:
        answer = self._worker.ask("resume_run", name=self.name, turn=self._turn)
        moved = answer["bytes_moved"] if answer["read_bytes"] is None else answer["read_bytes"]
        metrics = {
            "first_token_s": answer["seconds"],
            "cpu_s": answer["cpu_s"],
            "computed_tokens": answer["computed_tokens"],
        }
        return Sample(answer["seconds"], self._kv_bytes, int(moved), metrics)

    def close(self) -> None:
        pass


def show_resume(options: Options, contexts: Sequence[int], say: Say) -> list[Row]:
    """`contexts`: tokens, ascending."""
    task = dataclasses.replace(options.task(options.plan()), steps=options.pairs + 1)
    found = list[Row]()
    with contextlib.ExitStack() as stack:
        scratch, storage = (
            Path(stack.enter_context(folder_in(where)))
            for where in (scratch_parent(options.path), options.path)
        )
        say(f"resume: the weights of {task.name}")
        write_weights(
            dataclasses.replace(task, context=contexts[-1] + task.steps * QUESTION_TOKENS),
            scratch / "weights",
        )
        if options.throttle:  # before the worker, which inherits it
            stack.enter_context(throttled(options.path, options.throttle))
        worker = stack.enter_context(Worker("kv", "resume"))
        words = {
            "weights": str(scratch / "weights"),
            "storage": str(storage),
            "options": {**options.cache, "x_rows": 0},
        }
        is_text = worker.ask(
            "resume_open", task=dataclasses.replace(task, context=contexts[-1]).words(), **words
        )["is_text"]
        for context in contexts:
            say(f"resume: {task.name}, {task.batch} x {context} tokens are read")
            found += _point(
                options,
                dataclasses.replace(task, context=context),
                worker,
                is_text=is_text,
                say=say,
            )
    return found


def _point(options: Options, task: Task, worker: Worker, *, is_text: bool, say: Say) -> list[Row]:
    path, kv_bytes = (
        worker.ask("resume_fill", context=task.context)["effective_path"],
        task.kv_bytes(task.context),
    )
    params = options.params("resume", task) | {
        "question_tokens": QUESTION_TOKENS,
        "prefill": "the model's own",
        "text": "Python's reference" if is_text else "random tokens",
    }
    systems = {
        name: ResumeSystem(name, worker, kv_bytes, path if name == KEPT else "memory")
        for name in (KEPT, RECOMPUTED, IN_RAM)
    }
    rows = compare(
        "kv",
        params,
        [systems[KEPT]],
        [systems[RECOMPUTED], systems[IN_RAM]],
        pairs=options.pairs,
        seed=options.seed,
        say=say,
        settle_s=_SETTLE_S if options.throttle else 0,
    )
    verdicts = {
        name: Verdict(**worker.ask("resume_verdict", name=name)["verdict"])
        for name in (KEPT, IN_RAM)
    }
    rows = with_break_even(judged(rows, verdicts, say), kv_bytes)
    for row in rows:
        if row.median_s is not None:
            even = row.metrics.get("break_even_bytes_per_s")
            more = "" if even is None else f"; above {format_size(int(even))}/s a disk is worth it"
            say(f"    {row.system}: {row.median_s:.3f} s{more}")
    return rows


def with_break_even(rows: Sequence[Row], kv_bytes: int) -> list[Row]:
    """The row of the kept cache with the bandwidth from which on reading K and V is sooner than
    computing them: their bytes, over the time that an answer takes less when they are there
    already. Nothing where a row lacks its time, or nothing is saved."""
    times = {row.system: row.median_s for row in rows}
    recomputed, in_ram = times.get(RECOMPUTED), times.get(IN_RAM)
    more: dict[str, float] = {"kv_bytes": kv_bytes}
    if recomputed is not None and in_ram is not None and recomputed > in_ram:
        more["break_even_bytes_per_s"] = kv_bytes / (recomputed - in_ram)
    found = []
    for row in rows:
        if row.system == KEPT and row.median_s:
            row = dataclasses.replace(
                row,
                metrics={**row.metrics, **more, "read_bytes_per_s": row.bytes_moved / row.median_s},
            )
        found.append(row)
    return found
