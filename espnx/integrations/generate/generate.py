"""Generation for a file of prompts through caches on SSD: batches of like length, results as they
finish, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import errors
from ..transformers.cache import KVCache
from ..transformers.enable import enable_kv_cache
from ..transformers.forward.positions import check_positions, learned_positions
from .prompt_files import Prompt, append, read_done, sort_results

#: How many times as long as its prompts are on average padding may make a batch.
_PADDING = 1.25

Progress = Callable[[int, int], None]


@dataclass
class Report:
    """What a run did. Attributes: prompts written now, and those found from an earlier run; `stats`
    of each batch's cache; `results`, in the order of the prompts, where they went to no file."""

    prompts: int = 0
    skipped: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> float:
        return sum(stats[name] or 0 for stats in self.stats)


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of prompts that go together, the longest first: at most `size`, and of like
    length."""
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


def _check_lengths(model: Any, prompts: Sequence[Prompt], lengths: Sequence[int], new: int) -> None:
    """`new`: tokens to generate; the last of them is not fed to the model. Raises InvalidInputError
    naming the prompt."""
    limit = learned_positions(model)
    for prompt, length in zip(prompts, lengths, strict=True):
        if not length:
            raise errors.InvalidInputError(
                f"prompt {prompt.id!r}", got="no tokens", expected="at least one"
            )
        check_positions(f"prompt {prompt.id!r}", length, new, limit=limit)


def until_end(tokens: list[int], ends: int | Sequence[int] | None) -> list[int]:
    """New tokens up to the first end token, with it; what follows is padding, as long as the rest
    of the batch went on."""
    known = {ends} if isinstance(ends, int) else set(ends or ())
    stop = next((i for i, token in enumerate(tokens) if token in known), len(tokens))
    return tokens[: stop + 1]


def generate_file(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out: str | os.PathLike[str] | None,
    storage: Any,
    *,
    batch_size: int,
    settings: dict[str, Any],
    cache_options: dict[str, Any],
    generate_options: dict[str, Any],
    progress: Progress = lambda done, total: None,
) -> Report:
    """Generates for every prompt that `out` has no result for, and appends a JSON line for each as
    its batch finishes. In the end the lines are in the order of the prompts.

    Args:
        model, tokenizer: of transformers.
        out: a file of JSON lines; None: results are returned.
        settings: what results depend on; kept in every line, so that a resumed run does not mix two
            kinds.
        cache_options: of `KVCache`; generate_options: of the model's `generate`.

    Raises:
        InvalidInputError: `out` holds other results; a prompt has no tokens, or more than the model
            has positions. Nothing was generated.
        WriteError, DiskFullError: results cannot be written.

    And what a `KVCache` raises; the results of whole batches are written then, and the next run
    goes on after them.
    """
    enable_kv_cache(model)
    done = set() if out is None else read_done(out, settings, prompts)
    left = [prompt for prompt in prompts if prompt.id not in done]
    report = Report(skipped=len(prompts) - len(left))
    ids = [tokenizer(prompt.text)["input_ids"] for prompt in left]
    _check_lengths(model, left, [len(tokens) for tokens in ids], generate_options["max_new_tokens"])
    ends = model.generation_config.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends or 0
    pad = pad[0] if isinstance(pad, list) else pad
    if out is not None:
        append(out, [])
    progress(0, len(left))
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
        lines = list[dict[str, Any]]()
        for row, i in enumerate(batch):
            new = until_end(found[row, longest:].tolist(), ends)
            text = tokenizer.decode(new, skip_special_tokens=True)
            lines.append(
                {"id": left[i].id, "text": text, "tokens": new, "prompt_tokens": len(ids[i])}
            )
            lines[-1] |= {"prompt_digest": left[i].digest, "settings": settings}
        if out is None:
            report.results += lines
        else:
            append(out, lines)
        report.prompts += len(batch)
        progress(report.prompts, len(left))
    _into_order(report, out, prompts)
    return report


def _into_order(
    report: Report, out: str | os.PathLike[str] | None, prompts: Sequence[Prompt]
) -> None:
    """Puts the lines in the order of the prompts; batches came by length."""
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    report.results.sort(key=lambda line: order[line["id"]])
    if out is not None and report.prompts:
        sort_results(out, order)
