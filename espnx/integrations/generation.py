"""Generation for a file of prompts through caches on SSD: batches of like length, results as they finish, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import errors
from .streamed import load_streamed
from .transformers import KVCache, enable

#: Padding may make a batch at most so many times as long as its prompts are on average.
_PADDING = 1.25

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str


@dataclass
class Report:
    """What a run did. Attributes: prompts written now, and those found from an earlier run; `stats` of each batch's cache."""

    prompts: int = 0
    skipped: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> float:
        return sum(stats[name] or 0 for stats in self.stats)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """One prompt a line; of a ``.jsonl`` file objects with ``prompt`` and, if they have one, ``id``.

    Raises InvalidInputError naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other separators of lines
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInputError("prompts", got=str(error), expected="a readable text file in UTF-8") from error
    prompts, seen = list[Prompt](), set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = Prompt(str(number), line)
        if os.fspath(path).endswith(".jsonl"):
            try:
                found = json.loads(line)
                prompt = Prompt(str(found.get("id", number)), found["prompt"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise errors.InvalidInputError(
                    f"line {number} of {path}", got=repr(error), expected='{"id": ..., "prompt": ...}'
                ) from error
        if prompt.id in seen or not isinstance(prompt.text, str):
            raise errors.InvalidInputError(
                f"line {number} of {path}", got=f"id {prompt.id!r} again, or no text", expected="ids of their own"
            )
        seen.add(prompt.id)
        prompts.append(prompt)
    return prompts


def read_done(path: str | os.PathLike[str], settings: dict[str, Any]) -> set[str]:
    """Ids of the results that an earlier run wrote; a last line that was cut short is taken away.

    Raises InvalidInputError where they were made with other settings, or the file holds something else: nothing is changed then.
    """
    if not os.path.exists(path):
        return set()
    whole, done = 0, set[str]()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and (not line.strip() or line.startswith(b"{")):
                break  # the last one
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict) or "id" not in found:
                raise errors.InvalidInputError(
                    f"line {number} of {path}", got="something else", expected="results of an earlier run", fix="name another --out"
                )
            if found.get("settings") != settings:
                raise errors.InvalidInputError(
                    f"results in {path}", got=f"settings {found.get('settings')}", expected=str(settings), fix="name another --out"
                )
            done.add(found["id"])
            whole += len(line)
    if whole < os.path.getsize(path):
        os.truncate(path, whole)
    return done


def load_model(path: str, memory: str | None, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder; with `memory`, weights that do not fit into so much are streamed.

    Raises InvalidInputError where the folder holds none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if memory is not None:
            return load_streamed(path, memory=memory, dtype=dtype), tokenizer
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True).eval(), tokenizer
    except (OSError, ValueError) as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.InvalidInputError(
            f"model in {path}", got=str(error).splitlines()[0], expected="a folder with model and tokenizer"
        ) from error


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of prompts that go together, the longest first: at most `size`, and of like length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    for i in order:
        longest = lengths[batch[0]] if batch else 0
        mean = (sum(lengths[j] for j in batch) + lengths[i]) / (len(batch) + 1)
        if batch and (len(batch) == size or longest > _PADDING * max(mean, 1)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def generate_file(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out: str | os.PathLike[str],
    storage: Any,
    *,
    batch_size: int,
    settings: dict[str, Any],
    cache_options: dict[str, Any],
    generate_options: dict[str, Any],
    progress: Progress = lambda done, total: None,
) -> Report:
    """Generates for every prompt that `out` has no result for, and appends a JSON line for each as its batch finishes.

    Args:
        model, tokenizer: of transformers.
        settings: what results depend on; kept in every line, so that a resumed run does not mix two kinds.
        cache_options: of `KVCache`; generate_options: of the model's `generate`.

    Raises:
        What a `KVCache` raises; the results of whole batches are written then, and the next run goes on after them.
    """
    enable(model)
    done = read_done(out, settings)
    left = [prompt for prompt in prompts if prompt.id not in done]
    report = Report(skipped=len(prompts) - len(left))
    ids = [tokenizer(prompt.text)["input_ids"] for prompt in left]
    empty = next((prompt.id for prompt, tokens in zip(left, ids, strict=True) if not tokens), None)
    if empty is not None:
        raise errors.InvalidInputError(f"prompt {empty!r}", got="no tokens", expected="at least one")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else model.generation_config.eos_token_id or 0
    pad = pad[0] if isinstance(pad, list) else pad
    with open(out, "a", encoding="utf-8") as file:
        for batch in batches([len(tokens) for tokens in ids], batch_size):
            longest = max(len(ids[i]) for i in batch)
            tokens = torch.full((len(batch), longest), pad)
            mask = torch.zeros_like(tokens)
            for row, i in enumerate(batch):
                tokens[row, longest - len(ids[i]) :] = torch.tensor(ids[i])
                mask[row, longest - len(ids[i]) :] = 1
            with KVCache(model.config, storage, **cache_options) as cache, torch.no_grad():
                found = model.generate(
                    tokens.to(model.device),
                    attention_mask=mask.to(model.device),
                    past_key_values=cache,
                    pad_token_id=pad,
                    **generate_options,
                )
                report.stats.append(cache.stats())
            for row, i in enumerate(batch):
                new = found[row, longest:].tolist()
                text = tokenizer.decode(new, skip_special_tokens=True)
                line = {"id": left[i].id, "text": text, "tokens": new, "prompt_tokens": len(ids[i]), "settings": settings}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            report.prompts += len(batch)
            progress(report.prompts, len(left))
    return report
