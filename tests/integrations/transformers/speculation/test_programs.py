"""Random programs over one kept cache: texts go on, are cut, end apart, fail and are opened again,
by any draft or by none; after all of it the tokens are those of a model that never had a cache."""

from __future__ import annotations

import errno
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation.probe import check_pass
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import PAD, VOCABULARY, enabled, generate, make, plain
from tests.integrations.transformers.tiny import prompt as random_prompt
from tests.sweeps import some

_MOST_TOKENS = 400  # of a text: the model's positions end at 512
_TURNS = 5
_KINDS = ("pages", "4bit", "lookup", "twin", "other", None)
_TIERS = ("pages", "4bit")


class Program:
    """A batch of texts, and the cache that holds them.

    Args:
        folder: of the kept cache.
        seed: of all that is drawn.
    """

    def __init__(self, folder: Path, seed: int):
        self.draw = random.Random(seed)
        self.engines = list[FaultyEngine]()
        self.storage = [str(folder / str(i)) for i in range(self.draw.choice([1, 1, 2]))]
        for place in self.storage:
            Path(place).mkdir()
        lengths = [self.draw.randrange(1, 130) for _ in range(self.draw.choice([1, 1, 2, 3]))]
        self.text = random_prompt(lengths, seed=seed)
        self.x_rows = self.draw.choice([0, 0, 0, len(lengths)])
        self.log, self.done = list[str](), 0  # turns

    def opened(self) -> KVCache:
        """The cache, continued, with a draft of any kind."""
        kind = self.draw.choice([each for each in _KINDS if not self.x_rows or each not in _TIERS])
        options: dict[str, Any] = {
            "spill_interval": self.draw.choice([1, 8, 8, 30, 999]),
            "read_ahead_bytes": self.draw.choice([4096, 1 << 20]),
        }
        if kind == "pages":
            options["draft_memory"] = self.draw.choice([0.01, 0.2, 1.0])
        if kind in _TIERS:
            options["draft_read_ahead_bytes"] = self.draw.choice([None, 0, 1 << 20])
        else:
            options["x_rows"] = self.x_rows
        self.log.append(f"open {kind} {options}")
        draft: Any = {"twin": plain("llama"), "other": _other()}.get(str(kind), kind)
        rules = list[FaultRule]()
        if self.draw.random() < 0.4:
            fault, value = self.draw.choice([("error", errno.EIO), ("flip", 801)])
            nth = self.draw.randrange(1, 40)
            rules = [FaultRule(fault, operation="read", nth=nth, count=1, value=value)]  # type: ignore[arg-type]
            self.log.append(f"{fault} in read {nth}")

        def make_engine() -> FaultyEngine:
            self.engines.append(FaultyEngine(rules, poison=True, pool_bytes=1 << 20))
            return self.engines[-1]

        asked = options | {"name": "texts", "draft": draft, "engine": make_engine}
        try:
            return KVCache(enabled("llama").config, self.storage, **asked)
        except errors.StorageError:  # of what is kept beside the rows
            rules.clear()
            return KVCache(enabled("llama").config, self.storage, **asked)

    def _options(self) -> dict[str, Any]:
        """Of `generate`, which a plain model takes as well."""
        draw = self.draw
        options: dict[str, Any] = {"max_new_tokens": draw.choice([1, 2, 9, 25, 40])}
        ends = draw.sample(range(3, VOCABULARY), draw.choice([0, 0, 3, 8]))
        if ends:
            options["eos_token_id"] = ends
        more: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "min_new_tokens": min(5, options["max_new_tokens"]),
            "suppress_tokens": draw.sample(range(10, VOCABULARY), 20),
            "forced_eos_token_id": 7,
            "prefill_chunk_size": draw.choice([3, 19, 64]),
        }
        for name in draw.sample(list(more), draw.choice([0, 1, 2])):
            options[name] = more[name]
        if "min_new_tokens" in options and not ends:
            del options["min_new_tokens"]
        return options

    def turn(self, cache: KVCache, patch: pytest.MonkeyPatch) -> None:
        """The texts go on, by drafts where the cache has some."""
        draw, options = self.draw, self._options()
        wanted = one_by_one("llama", self.text, **options)
        gamma = draw.choice([None, None, 0, 1, 3, 8, 24, 1000])
        self.log.append(f"{options}, gamma {gamma}, {cache.get_seq_length()} held")
        if cache.draft is not None and draw.random() < 0.6:
            drafting(patch, wanted, draw.choice([0.3, 0.8, 1.0]), seed=draw.randrange(99))
        else:
            patch.undo()
        cache.reuse_prefix(**self.text)
        is_broken = cache.draft is not None and draw.random() < 0.3
        hook = self._break(draw.randrange(1, 30)) if is_broken else None
        for _ in range(4):
            try:
                got = self._generate(cache, options, gamma)
                break
            except (errors.StorageError, errors.StateError) as error:
                self.log.append(f"failed: {type(error).__name__}")
                so_far = error.sequences  # type: ignore[union-attr]
                n = min(so_far.shape[1], wanted.shape[1])
                # texts of unlike lengths are padded
                is_right = (so_far[:, :n] == wanted[:, :n]) | (so_far[:, :n] == PAD)
                assert bool(is_right.all()), self.log
                if hook is not None:
                    hook.remove()
                cache.reuse_prefix(**self.text)
        if hook is not None:
            hook.remove()
        assert torch.equal(got, wanted), self.log
        self._extend(got)

    def _generate(self, cache: KVCache, options: dict[str, Any], gamma: int | None) -> torch.Tensor:
        if cache.draft is None:
            return generate(enabled("llama"), self.text, cache, **options)
        return speculated("llama", self.text, cache, gamma=gamma, **options)

    @staticmethod
    def _break(nth: int) -> Any:
        """The model's nth logits are NaN, be they a draft's or a pass's."""
        calls = 0

        def broken(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output * float("nan") if calls == nth else output

        return enabled("llama").lm_head.register_forward_hook(broken)

    def _extend(self, got: torch.Tensor) -> None:
        """The next prompt: what was said, and more."""
        new = self.draw.choice([1, 1, 4, 16, 17, 40])
        more = random_prompt([new] * len(got), seed=self.draw.randrange(999))["input_ids"]
        ids = torch.cat([got, more], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : self.text["attention_mask"].shape[1]] = self.text["attention_mask"]
        self.text = {"input_ids": ids, "attention_mask": mask}

    def cut(self, cache: KVCache) -> None:
        """The cache, or the texts too, go back by some tokens."""
        held = cache.get_seq_length()
        if held > 1 and self.draw.random() < 0.7:
            n = self.draw.randrange(1, held)
            self.log.append(f"crop {n} of {held}")
            cache.crop(-n)
        if (length := self.text["input_ids"].shape[1]) > 60 and self.draw.random() < 0.5:
            # no text ends before it begins
            least = int((self.text["attention_mask"] == 0).sum(dim=1).max()) + 1
            n = self.draw.randrange(max(least, length // 2), length + 1)
            self.log.append(f"texts of {n} tokens")
            self.text = {name: rows[:, :n] for name, rows in self.text.items()}

    def _close(self, cache: KVCache) -> None:
        """Saves it, in the second try where a fault hits the first."""
        try:
            cache.close()
        except errors.StorageError as error:
            self.log.append(f"not saved: {type(error).__name__}")
            cache.close()

    def run(self, patch: pytest.MonkeyPatch) -> None:
        """Everything, to the end."""
        while self.done < _TURNS and self.text["input_ids"].shape[1] < _MOST_TOKENS:
            with ExitStack() as at_end:
                cache = self.opened()
                at_end.callback(self._close, cache)
                for _ in range(self.draw.choice([1, 1, 2])):
                    self.turn(cache, patch)
                    self.done += 1
                    if self.draw.random() < 0.4:
                        self.cut(cache)
        for engine in self.engines:
            engine.close()


def _other() -> Any:
    """A smaller model that knows nothing."""
    return make("qwen3", seed=3, num_hidden_layers=1)


@pytest.mark.parametrize("seed", some(range(120), of=15))
def test_random_programs(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pass(enabled("llama"), random_prompt([20])["input_ids"])
    Program(folder, seed).run(monkeypatch)
