"""What the worker does: decodes one by one and with drafts from one kept cache, and counts the
tokens of passes over text that is given (teacher-forced), where nothing depends on the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoTokenizer, DynamicCache

from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.speculation.generate import generate
from espnx.integrations.transformers.speculation.undecided import Undecided
from espnx.kv.draft.lookup import continuation
from espnx.kv.draft.rows import tier_of
from espnx.kv.draft.sources import LOOKUP

from ...kv_quality.recall import NAME as HELD_OUT
from ...kv_quality.recall import HeldOut
from ...machine.counters import read_counters
from ..resume import text_tokens
from ..systems.caches import without_attention
from ..systems.models import Task, load_model, tolerance_of_rounded_rows

ONE_BY_ONE = "one-by-one"
#: Options of the cache of each system.
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "pages-1/16": {"draft": "pages", "draft_memory": 1 / 16},
    "pages-1/8": {"draft": "pages", "draft_memory": 1 / 8},
    "pages-1/4": {"draft": "pages", "draft_memory": 1 / 4},
    "4bit": {"draft": "4bit"},
    "lookup": {"draft": "lookup"},
    ONE_BY_ONE: {},
}
#: Texts whose tokens are given: one that goes on, and one that quotes itself from here on.
TEXTS = ("text", "quoted")
GAMMA = 8
_CHUNK_TOKENS = 512


@dataclass
class _Counts:
    """What passes over given tokens bring. `whole_bytes`: all of K and V, once for each token."""

    passes: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * GAMMA)
    whole_bytes: int = 0
    draft_bytes: int = 0

    def add(self, proposed: Sequence[int], said: Sequence[int]) -> int:
        """A pass: how many tokens it brings."""
        right = 0
        while right < len(proposed) and proposed[right] == said[right]:
            self.accepted[right] += 1
            right += 1
        self.passes, self.tokens = self.passes + 1, self.tokens + right + 1
        return right + 1


class SpeculationWork:
    """A worker's model and a context, of which several caches are continued.

    Args:
        task: `context` is the longest; `steps`: new tokens of each turn.
        positions: of each text whose tokens are given.
        weights, storage: directories.
        options: of the caches.
        is_shared: all sequences begin with the same text, which is computed once, and go on from
            different tokens. Each has rows of its own.
        draft_read_ahead: bytes that may be read while a model drafts; None: as the cache has it.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        positions: int,
        weights: str,
        storage: str,
        options: Mapping[str, Any],
        is_shared: bool = False,
        draft_read_ahead: int | None = None,
    ):
        self.draft_read_ahead = draft_read_ahead
        self.task, self.positions = Task(**task), positions
        self.model = load_model(Path(weights), self.task.dtype)
        enable_kv_cache(self.model)
        self.storage, self.options = storage, dict(options)
        length = self.task.context + positions + GAMMA + 1
        self.tokens, self.source = _text(Path(weights), self.task, length)
        self.is_shared = is_shared
        if is_shared:
            self.tokens[:, : self.task.context] = self.tokens[0, : self.task.context]
        self.found = dict[str, torch.Tensor]()

    @torch.inference_mode()
    def fill(self, context: int, batch: int | None = None) -> dict[str, Any]:
        """Reads the contexts of the batch, and the first one alone, into kept caches, and decodes
        one by one for comparison. `batch`: of the task's, the first so many; None: all."""
        self.context, self.batch = context, batch or self.task.batch
        self.found.clear()
        for n in sorted({1, self.batch}):
            with self._kept(ONE_BY_ONE, n) as cache:
                if cache.get_seq_length():
                    continue  # of another fill
                if self.is_shared:
                    self._write_alike(cache, n)
                    continue
                for part in self.tokens[:n, :context].split(_CHUNK_TOKENS, dim=1):
                    self.model(
                        input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1
                    )
        with self._kept(ONE_BY_ONE, self.batch) as cache:
            begun = time.perf_counter()
            out = self._decode(cache, ONE_BY_ONE, return_dict_in_generate=True, output_logits=True)
            seconds = time.perf_counter() - begun
            self.reference = out.sequences[:, context + 1 :]
            self.logits = torch.stack(list(out.logits), dim=1).float()  # [batch, new, vocabulary]
            path = str(cache.stats()["effective_path"])
            cache.crop(context - cache.get_seq_length())
        return {"effective_path": path, "source": self.source, "one_by_one_s": seconds}

    def _write_alike(self, cache: KVCache, n: int) -> None:
        """The rows of the first sequence's context, computed once, as those of `n` sequences."""
        ids = self.tokens[:n, : self.context]
        rows = DynamicCache(config=self.model.config)
        for part in ids[:1].split(_CHUNK_TOKENS, dim=1):
            self.model(input_ids=part, past_key_values=rows, use_cache=True, logits_to_keep=1)
        heads = self.model.config.num_attention_heads
        cache.passes.begin(self.model, ids, n)
        with mock.patch("espnx.kv.attention.chunk_attention", without_attention):
            for layer, held in zip(cache.layers, rows.layers, strict=True):
                k, v = (each.expand(n, -1, -1, -1) for each in (held.keys, held.values))
                layer.update(k, v)
                q = k.new_zeros(1).expand(n, heads, k.shape[2], k.shape[3])
                layer.attend(q, None, 1.0)
        cache.passes.end(self.model, failed=False)

    def _kept(self, system: str, batch: int) -> KVCache:
        """The kept cache, which a system's own draft continues. Who uses it brings it back."""
        options = dict(SYSTEMS[system])
        if options and options["draft"] != LOOKUP:
            options["draft_read_ahead_bytes"] = self.draft_read_ahead
        return KVCache(
            self.model.config,
            self.storage,
            name=f"{batch}-of-{self.context}",
            **self.options,
            **options,
        )

    def _decode(self, cache: KVCache, system: str, gamma: int | None = None, **more: Any) -> Any:
        ids = self.tokens[: self.batch, : self.context + 1]
        drafts = {"custom_generate": generate, "gamma": gamma}
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=self.task.steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **({} if system == ONE_BY_ONE else drafts),
            **more,
        )

    @torch.inference_mode()
    def run(self, system: str, gamma: int | None = None, name: str | None = None) -> dict[str, Any]:
        """One turn: so many new tokens of each sequence, behind the same context.

        Args:
            gamma: tokens that are proposed; None: chosen.
            name: by which the tokens are asked for; None: the system's.
        """
        with self._kept(system, self.batch) as cache:
            before, asked = read_counters(), cache.stats()
            begun = time.perf_counter()
            self.found[name or system] = self._decode(cache, system, gamma)[:, self.context + 1 :]
            seconds, spent = time.perf_counter() - begun, read_counters() - before
            stats = cache.stats()
            cache.crop(self.context - cache.get_seq_length())
        said = stats["speculation"] or {}
        return {
            "seconds": seconds,
            "read_bytes": spent.device_read_bytes,
            "bytes_moved": stats["bytes_moved"] - asked["bytes_moved"],
            "bytes_asked": stats["bytes_asked"] - asked["bytes_asked"],
            "tokens_a_pass": said.get("tokens_a_pass", 1.0),
            "draft_bytes": said.get("draft_bytes_asked", 0),
            "draft_memory_bytes": said.get("draft_memory_bytes", 0),
            "draft_s": said.get("draft_s", 0.0),
            "read_ahead_bytes": said.get("read_ahead_bytes", 0),
            "read_ahead_limit_bytes": said.get("read_ahead_limit_bytes", 0),
            # of the passes that are remembered, most often
            "gamma": mode([each["gamma"] for each in said.get("decisions", [])] or [0]),
        }

    def verdict(self, system: str) -> dict[str, Any]:
        """The tokens of the system's last turn beside those of decoding one by one: what is wrong,
        or None; the places where they part, each with both logits. Behind such a place a sequence
        is another text."""
        dtype = self.task.dtype
        rows = str(self.options.get("format") or dtype)
        tolerance = tolerance_of_rounded_rows(self.model.config, dtype, rows)
        problem, places = None, list[dict[str, Any]]()
        for row, (mine, wanted) in enumerate(zip(self.found[system], self.reference, strict=True)):
            if torch.equal(mine, wanted):
                continue
            at = int((mine != wanted).nonzero()[0])
            logits = self.logits[row, at]
            best, other = float(logits[wanted[at]]), float(logits[mine[at]])
            gap = (best - other) / float(logits.std())
            places.append({"sequence": row, "token": at, "best": best, "other": other})
            if gap > 2 * tolerance:
                problem = (
                    f"sequence {row}, token {at}: {gap:.3g} deviations below the best, allowed "
                    f"are {2 * tolerance:.3g}"
                )
        return {"problem": problem, "places": places}

    @torch.inference_mode()
    def forced(self, system: str, text: str) -> dict[str, Any]:
        """Passes over given tokens, behind the context of one sequence: at each, `GAMMA` tokens are
        proposed, what was proposed first being right or not, the given ones follow; those before
        the first wrong one count, and one more."""
        ids, counts = self._given(text), _Counts()
        with self._kept(system, 1) as cache:
            make_tier = tier_of(cache.draft)
            cache.store.propose(make_tier)
            undecided = Undecided(cache.passes)
            try:
                at = self.context
                if make_tier is not None:  # names pages, as the first pass of any text does
                    self._pass(cache, ids[:, at : at + 1])
                    undecided.accept(1, [1])
                    at += 1
                asked = _asked(cache)
                while at < self.context + self.positions:
                    begun = _asked(cache)
                    proposed = self._proposed(cache, ids, at, by_model=make_tier is not None)
                    counts.draft_bytes += _asked(cache) - begun
                    said = self._pass(cache, ids[:, at : at + GAMMA + 1])
                    kept = counts.add(proposed, said)
                    counts.whole_bytes += kept * self.task.kv_bytes(at) // self.task.batch
                    undecided.accept(GAMMA + 1, [kept])
                    at += kept
                memory_bytes = cache.store.tier_bytes
            finally:
                undecided.settle()
            share_asked = (_asked(cache) - asked) / counts.whole_bytes
            cache.crop(self.context - cache.get_seq_length())
        return {
            "tokens_a_pass": counts.tokens / counts.passes,
            "passes": counts.passes,
            "accepted": [count / counts.passes for count in counts.accepted],
            "asked_share": share_asked,
            "draft_bytes": counts.draft_bytes,
            "draft_memory_bytes": memory_bytes,
        }

    def _given(self, text: str) -> torch.Tensor:
        """int64 [1, n]: a context and what is given behind it."""
        ids = self.tokens[:1].clone()
        if text == "quoted":
            half = self.context // 2
            n = min(ids.shape[1] - self.context, self.context - half)
            ids[:, self.context : self.context + n] = ids[:, half : half + n]
        return ids

    def _proposed(self, cache: KVCache, ids: torch.Tensor, at: int, *, by_model: bool) -> list[int]:
        if not by_model:
            return continuation(ids[0, : at + 1].numpy(), GAMMA)
        with Undecided(cache.passes).drafting():
            return [self._pass(cache, ids[:, at + i : at + i + 1])[0] for i in range(GAMMA)]

    def _pass(self, cache: KVCache, ids: torch.Tensor) -> list[int]:
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        found: list[int] = logits[0].argmax(dim=-1).tolist()
        return found


def _asked(cache: KVCache) -> int:
    asked: int = cache.stats()["bytes_asked"]
    return asked


def _text(weights: Path, task: Task, length: int) -> tuple[torch.Tensor, str]:
    """int64 [batch, length], and what it is."""
    count = task.batch * length
    if (weights / HELD_OUT).exists():
        tokens = HeldOut.load(weights).tokens.astype(np.int64)
        found, source = torch.from_numpy(np.resize(tokens, count)), "held-out text"
    elif (weights / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
        found, source = text_tokens(tokenizer, count), "Python's reference"
    else:
        generator = torch.Generator().manual_seed(task.seed)
        vocabulary = int(task.config["vocab_size"])
        found, source = torch.randint(2, vocabulary, (count,), generator=generator), "random tokens"
    return found.view(task.batch, length), source
