"""The second part of the demo: a small trained model reads what the search found, with its K and V
on SSD, and recalls a line far back.

The prompts are documentation with lines ``KEY garden: silver river`` in the middle, and end with
``GET garden:``. The tokens are compared with those of transformers' own cache in memory; then the
cache that was kept on SSD is opened again for another question.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from espnx.benchmarks.kv_quality.recall import HeldOut
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.sizes import format_size
from espnx.tables import render_table

NEW_TOKENS = 24
LINES = 3  # with a key, in each prompt
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Prompt:
    """Documentation with key lines, and a question for each of them.

    Attributes:
        body: tokens; the questions come behind them.
        questions: tokens of ``GET key:``.
        answers: what stands on the key lines.
        distances: from what stands on each key line to where the model repeats it, in tokens.
    """

    body: list[int]
    questions: list[list[int]]
    answers: list[list[int]]
    distances: list[int]


def make_prompt(text: list[int], held_out: HeldOut, count: int, rng: np.random.Generator) -> Prompt:
    """`count` tokens in all, the question and what is generated behind it included; `text` is
    repeated or cut."""
    # so that all questions are equally long
    short = [word for word in held_out.words if len(word) == 1]
    keys = [short[pick] for pick in rng.choice(len(short), LINES, replace=False)]
    picks = rng.choice(len(held_out.words), size=(LINES, 2), replace=False)
    answers = [[token for word in pick for token in held_out.words[word]] for pick in picks]
    lines = [
        [*head, *tail]
        for head, tail in (held_out.line("KEY", *pair) for pair in zip(keys, answers, strict=True))
    ]
    questions = [held_out.line("GET", key, [])[0] for key in keys]
    room = count - NEW_TOKENS - len(questions[0]) - sum(map(len, lines))
    words = np.resize(np.array(text or [0]), room).tolist()
    body, ends = list[int](), list[int]()
    step = max(1, room // 16)
    # the lines stand behind the middle: farther back such a small model forgets most of them
    # (docs/demo-model.md)
    begin = room // 2
    body += words[:begin]
    for number, line in enumerate(lines):
        body += words[begin + number * step : begin + (number + 1) * step] + line
        ends.append(len(body))
    body += words[begin + LINES * step :]
    # The newline that ends a line does not count.
    distances = [
        len(body) - end + 1 + len(question) + len(answer)
        for end, question, answer in zip(ends, questions, answers, strict=True)
    ]
    return Prompt(body, questions, answers, distances)


def ask(
    model: Any, prompts: Sequence[Prompt], number: int, cache: Any
) -> tuple[list[list[int]], int, int]:
    """(what was generated, tokens of each prompt, how many of them were in the cache already) for
    one question of every prompt."""
    ids = torch.tensor([prompt.body + prompt.questions[number] for prompt in prompts])
    known = cache.reuse_prefix(ids) if isinstance(cache, KVCache) else 0
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        prefill_chunk_size=PREFILL_CHUNK,
    )
    return made[:, ids.shape[1] :].tolist(), ids.shape[1], known


def is_right(made: list[int], answer: list[int], newline: list[int]) -> bool:
    return made[: len(answer) + len(newline)] == answer + newline


def generate(folder: Path, texts: Sequence[str], storage: Path) -> bool:
    """Prints what happened; False where tokens differ from those of the cache in memory.

    Args:
        folder: of the model.
        texts: documentation, for a prompt each.
        storage: a directory on the SSD; nothing stays in it.
    """
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    held_out, rng = HeldOut.load(folder), np.random.default_rng(0)
    context = model.config.max_position_embeddings
    prompts = [
        make_prompt(tokenizer(text, verbose=False).input_ids, held_out, context, rng)
        for text in texts
    ]
    expected = [
        ask(model, prompts, number, DynamicCache(config=model.config))[0] for number in (0, 1)
    ]
    enable_kv_cache(model)
    storage.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=storage) as kept:
        with KVCache(model.config, kept, name="demo") as cache:
            first, length, _ = ask(model, prompts, 0, cache)
            stats = cache.stats()
        with KVCache(model.config, kept, name="demo") as cache:
            second, _, known = ask(model, prompts, 1, cache)
    report(tokenizer, held_out, prompts, (first, second), expected, length, known, stats)
    return [first, second] == expected


def report(
    tokenizer: Any,
    held_out: HeldOut,
    prompts: Sequence[Prompt],
    made: Sequence[list[list[int]]],
    expected: Sequence[list[list[int]]],
    length: int,
    known: int,
    stats: dict[str, Any],
) -> None:
    """A table of numbers, and a line for each question."""
    same = sum(
        ours == theirs
        for pair in zip(made, expected, strict=True)
        for ours, theirs in zip(*pair, strict=True)
    )
    rates = {
        kind: f"{stats[f'{kind}_tokens']:,} tokens, "
        f"{stats[f'{kind}_tokens'] / stats[f'{kind}_s']:,.0f} a second"
        for kind in ("prefill", "decode")
        if stats[f"{kind}_s"]
    }
    path = stats["effective_path"]
    rows = [
        (
            "prompts",
            (
                f"{len(prompts)} of {length:,} tokens: documentation, with {LINES} lines `KEY "
                "word: words` far back"
            ),
        ),
        ("tokens generated", f"{len(prompts)} x {len(made[0][0])}, for each of two questions"),
        (
            "same tokens as in memory",
            f"{same} of {sum(map(len, made))} (transformers' DynamicCache)",
        ),
        *rates.items(),
        ("path", f"{path}; page cache bypassed: {'no' if 'buffered' in path else 'yes'}"),
        ("bytes written", format_size(stats["bytes_written"])),
        ("bytes asked", format_size(stats["bytes_asked"])),
        ("bytes moved", format_size(stats["bytes_moved"])),
        (
            "opened again",
            f"the kept cache held {known:,} of the {length:,} tokens of the second question",
        ),
    ]
    print(render_table(("", ""), rows) + "\n")
    newline = held_out.marks["\n"]
    for number, answers in enumerate(made):
        for prompt, ids in zip(prompts, answers, strict=True):
            right = is_right(ids, prompt.answers[number], newline)
            asked, answer, wanted = (
                tokenizer.decode(part).strip()
                for part in (prompt.questions[number], ids, prompt.answers[number])
            )
            verdict = "right" if right else f"the line says {wanted}"
            print(
                f"{asked} {(answer.splitlines() or [''])[0]}    ({verdict}, "
                f"{prompt.distances[number]:,} tokens back)"
            )
