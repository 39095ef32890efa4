"""``--show ttft``: time to the first token behind composed passages, beside computing them, one
kept prefix, the same rows in memory, and fio."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from espnx.errors import StateError
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.passages.cache import PassageCache
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.integrations.transformers.passages.rotary import rotary_rows
from espnx.kv.passages.context import Context, Passage

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import Sample, compare
from ..io.content import ensure_file
from ..io.fio import FioSystem, variants
from ..io.work import SEQUENTIAL_STEP_BYTES, Point, Work
from ..kv.fleet import folder_in
from ..kv.measure import FIO_FILE, Verdict, judge_step, judged
from ..kv.resume import text_tokens
from ..kv.systems.models import tolerance_of_other_shapes
from ..machine.counters import read_counters
from .memory import computed, joined
from .options import PREFIX_TOKENS, QUESTION_TOKENS, Opened, Options

COMPOSED, RECOMPUTED, KEPT = "composed", "recomputed", "kept-prefix"
IN_RAM, ROTATED = "rows-in-ram", "keys-rotated"
#: What each system's logits are held against.
REFERENCES = {COMPOSED: ROTATED, IN_RAM: ROTATED, KEPT: RECOMPUTED}
_FOLLOWING = 8  # tokens behind the first that are compared before anything is measured


class FirstToken:
    """One point: a prefix and passages of as many tokens each, and the ways to the first token of a
    question about them. A context manager; what it has stored is its caller's to remove.

    Args:
        opened: the model.
        storage: a directory of its own, on the SSD.
        total, passage_tokens: of all passages, and of each.
        turns: questions; number 0 is for verifying.
    """

    def __init__(
        self, opened: Opened, storage: Path, total: int, passage_tokens: int, turns: int
    ) -> None:
        self.model, self.storage = opened.model, storage
        tokens = text_tokens(opened.tokenizer, PREFIX_TOKENS + total + turns * QUESTION_TOKENS)
        self.prefix = tokens[:PREFIX_TOKENS]
        self.passages = tokens[PREFIX_TOKENS : PREFIX_TOKENS + total].split(passage_tokens)
        self.questions = tokens[PREFIX_TOKENS + total :].split(QUESTION_TOKENS)
        self.context = tokens[: PREFIX_TOKENS + total]
        self.logits = dict[str, dict[int, list[torch.Tensor]]]()
        self.answers = dict[str, list[int]]()
        self._stack = contextlib.ExitStack()
        try:
            self._fill()
        except BaseException:
            self._stack.close()
            raise

    @torch.inference_mode()
    def _fill(self) -> None:
        kv = PassageKV(self.model, self.storage / "library", prefix=self.prefix)
        self.kv = self._stack.enter_context(kv)
        self.keys = [self.kv.add(each) for each in self.passages]
        with self._kept() as cache:
            self._pass(self.context, cache)
        self.parts = computed(self.model, self.prefix, self.passages)
        self.rotated = joined(self.model, self.parts, has_prefix=True)
        self.rows = rotary_rows(self.model)
        self.kv_bytes = sum(k.nbytes + v.nbytes for part in self.parts for k, v in part)
        for name in (ROTATED, RECOMPUTED):
            self.run(name, 0)
        with self.kv.compose(self.keys[:1]) as cache:
            self.effective_path = str(cache.stats()["effective_path"])

    def _kept(self) -> KVCache:
        return KVCache(self.model.config, self.storage / "kept", name="context", x_rows=0)

    def _pass(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of the last token, [1, vocabulary]."""
        return self.model(
            input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, int]]:
        """(cache, tokens of the prompt that it holds)."""
        if name == COMPOSED:
            with self.kv.compose(self.keys, question_tokens=QUESTION_TOKENS) as cache:
                yield cache, cache.composed_tokens
        elif name == IN_RAM:
            with self._in_ram() as cache:
                yield cache, cache.composed_tokens
        elif name == KEPT:
            with self._kept() as kept:
                # as a program asks that has the whole prompt
                ids = torch.cat([self.context, self.questions[0]])[None]
                yield kept, kept.reuse_prefix(ids)
                kept.crop(len(self.context) - kept.get_seq_length())
        elif name == ROTATED:
            yield self.rotated, self.rotated.get_seq_length()
            self.rotated.crop(len(self.context) - self.rotated.get_seq_length())
        else:
            yield DynamicCache(config=self.model.config), 0

    def _in_ram(self) -> PassageCache:
        """What composes, with all rows in memory."""
        passages, begin = list[Passage](), 0
        for number, part in enumerate(self.parts):
            n = part[0][0].shape[2]
            offset = begin - PREFIX_TOKENS if number else 0
            passages.append(Passage(n, offset, None, part, number > 0))
            begin += n
        context = Context(self.rows.shape, passages, self.rows.rotations, ())
        ids = self.context.numpy().astype(np.int32)[None]
        return PassageCache(
            self.model.config, self.storage, context, ids, np.ones_like(ids, bool), {}
        )

    @torch.inference_mode()
    def run(self, name: str, turn: int) -> dict[str, float]:
        """One turn. In the first, the tokens behind the first one are computed too, outside the
        measured time: those that the reference has chosen."""
        question = self.questions[turn]
        before, begun = read_counters(), time.perf_counter()
        with self._opened(name) as (cache, known):
            if known != (0 if name == RECOMPUTED else len(self.context)):
                raise StateError(
                    f"{name} of the benchmark",
                    got=f"{known} tokens that are there already",
                    expected=len(self.context),
                )
            first = self._pass(question if known else torch.cat([self.context, question]), cache)
            first.argmax(-1).tolist()
            seconds, spent = time.perf_counter() - begun, read_counters() - before
            found = [first]
            if not turn:
                found += self._follow(REFERENCES.get(name, name), first, cache)
            self.logits.setdefault(name, {})[turn] = found
            moved = cache.reused["bytes"] if name == COMPOSED else 0
            moved = cache.stats()["bytes_moved"] if name == KEPT else moved
        return {
            "seconds": seconds,
            "cpu_s": spent.cpu_s,
            "bytes_moved": float(
                moved if spent.device_read_bytes is None else spent.device_read_bytes
            ),
            "computed_tokens": len(question) + (0 if known else len(self.context)),
        }

    def _follow(self, reference: str, first: torch.Tensor, cache: Any) -> list[torch.Tensor]:
        """Logits behind the first token, the reference's tokens being fed."""
        answer, found = self.answers.setdefault(reference, []), [first]
        for step in range(_FOLLOWING):
            if len(answer) == step:
                answer.append(int(found[-1].argmax(-1)))
            found.append(self._pass(torch.tensor(answer[step : step + 1]), cache))
        return found[1:]

    def verdict(self, name: str) -> Verdict:
        """Every logit that was computed beside the reference's of the same turn."""
        tolerance = tolerance_of_other_shapes(self.model.config, "fp32")
        found = list[Verdict]()
        for turn, logits in self.logits.get(name, {}).items():
            theirs = self.logits[REFERENCES[name]].get(turn, [])
            for step, (mine, other) in enumerate(zip(logits, theirs, strict=False)):
                one = judge_step(
                    other.float().numpy(), mine.argmax(-1).numpy(), mine.float().numpy(), tolerance
                )
                if one.problem is not None:
                    one = dataclasses.replace(
                        one, problem=f"turn {turn}, token {step}: {one.problem}"
                    )
                found.append(one)
        return Verdict(
            next((one.problem for one in found if one.problem), None),
            max((one.error for one in found if one.error is not None), default=None),
            float(np.mean([one.same for one in found])),
        )

    def __enter__(self) -> FirstToken:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class FirstTokenSystem:
    """A way to the first token, for the runner."""

    def __init__(self, name: str, point: FirstToken):
        self.name = self.group = name
        is_stored = name in (COMPOSED, KEPT)
        self.requested_path = self.effective_path = point.effective_path if is_stored else "memory"
        self._point, self._turn = point, 0

    def verify(self) -> str | None:
        if self.name not in REFERENCES:
            return None  # what the others are compared with
        self._point.run(self.name, 0)
        return self._point.verdict(self.name).problem

    def prepare(self, turn: int) -> str:
        self._turn = turn + 1
        gc.collect()
        is_stored = self.name in (COMPOSED, KEPT)
        return "cold" if is_stored and "buffered" not in self.effective_path else "warm"

    def run(self) -> Sample:
        answer = self._point.run(self.name, self._turn)
        metrics = {
            "first_token_s": answer["seconds"],
            "cpu_s": answer["cpu_s"],
            "computed_tokens": answer["computed_tokens"],
        }
        return Sample(answer["seconds"], self._point.kv_bytes, int(answer["bytes_moved"]), metrics)

    def close(self) -> None:
        pass


def show_first_token(options: Options, opened: Opened, say: Say) -> list[Row]:
    """A point for each number of tokens and size of passages."""
    found = list[Row]()
    most = getattr(opened.model.config, "max_position_embeddings", None)
    for total in options.tokens:
        for each in options.passage_tokens:
            whole = PREFIX_TOKENS + total + QUESTION_TOKENS + _FOLLOWING
            if most is not None and whole > most:
                say(f"    {total} tokens are left out: {opened.name} has {most} positions")
                continue
            with folder_in(options.path) as folder:
                say(f"    {total // each} passages of {each} tokens are computed and kept")
                with FirstToken(opened, Path(folder), total, each, options.pairs + 1) as point:
                    found += _point(options, opened, point, Path(folder), total, each, say)
    return found


def _point(
    options: Options,
    opened: Opened,
    point: FirstToken,
    storage: Path,
    total: int,
    each: int,
    say: Say,
) -> list[Row]:
    params = {
        "show": "ttft",
        "model": opened.name,
        "dtype": "fp32",
        "tokens": total,
        "passage_tokens": each,
        "prefix_tokens": PREFIX_TOKENS,
        "question_tokens": QUESTION_TOKENS,
    }
    rows = compare(
        "rag",
        params,
        [FirstTokenSystem(COMPOSED, point)],
        [
            *(FirstTokenSystem(name, point) for name in (RECOMPUTED, KEPT, IN_RAM, ROTATED)),
            *_fio_systems(options, point.kv_bytes, storage, say),
        ],
        pairs=options.pairs,
        seed=options.seed,
        say=say,
    )
    verdicts = {name: point.verdict(name) for name in REFERENCES}
    rows = [_beside_bound(row, rows) for row in judged(rows, verdicts, say)]
    for row in rows:
        if row.median_s is not None:
            say(f"    {row.system}: {row.median_s:.3f} s")
    return rows


def _beside_bound(row: Row, rows: list[Row]) -> Row:
    """The row of what is composed with its time over the longer one of memory and fio, on as many
    bytes: nothing can be sooner than both."""
    times = {each.system: each.median_s for each in rows if each.median_s is not None}
    fio = next((each for each in rows if each.system == "fio" and each.median_s), None)
    bounds = [times[IN_RAM]] if IN_RAM in times else []
    metrics = dict(row.metrics)
    if fio is not None and fio.median_s:
        metrics["fio_s"] = fio.median_s / fio.bytes_asked * row.bytes_asked
        bounds.append(metrics["fio_s"])
    if row.system != COMPOSED or row.median_s is None or not bounds:
        return row
    return dataclasses.replace(row, metrics={**metrics, "over_bound": row.median_s / max(bounds)})


def _fio_systems(options: Options, size_bytes: int, storage: Path, say: Say) -> list[FioSystem]:
    """fio on about as many bytes as the rows; none, and said, where it is not installed."""
    if shutil.which("fio") is None:
        say("    the disk's own line is left out: fio is not installed")
        return []
    steps = max(1, round(size_bytes / SEQUENTIAL_STEP_BYTES))
    data = ensure_file(storage / FIO_FILE, steps * SEQUENTIAL_STEP_BYTES, options.seed, say)
    point = Point("read", "sequential", 960 << 10, 8)
    work = Work(point, data, steps * SEQUENTIAL_STEP_BYTES // point.block_bytes, options.seed)
    return [FioSystem(work, variant) for variant in variants(point)]
