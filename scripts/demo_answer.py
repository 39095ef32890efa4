"""The second part of the demo: a language model answers a question from what the search found, with
its K and V on SSD. Then a new process opens what was kept for another question, and the time to its
first token stands beside that of reading everything again.

Run as a program it is that process: the job comes as JSON on standard input, what happened goes as
JSON to standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer

from espnx.benchmarks.kv.systems.models import tolerance_of_other_shapes
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.sizes import format_size
from espnx.tables import render_table

NEW_TOKENS = 48
# of passages, at most: more takes a small machine long to read without a cache, which the demo does
# thrice
CONTEXT_TOKENS = 2048
NAME = "documentation"
ASK = "Answer the question from this documentation.\n\n{}\n\nQuestion: {}"


@dataclass(frozen=True)
class Answer:
    """`first_s`: from the prompt, with opening the cache, to the first token. `known`: tokens of
    the prompt that the cache held."""

    tokens: list[int]
    logits: list[torch.Tensor]
    first_s: float
    known: int


class Watch(BaseStreamer):
    """Watches `generate`: when the prompt and each token came."""

    def __init__(self) -> None:
        self.times = list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(folder: str | Path) -> tuple[Any, Any]:
    """(model, tokenizer), the model able to attend over stored rows."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    return enable_kv_cache(model), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def make_prompts(
    tokenizer: Any, passages: Sequence[str], questions: Sequence[str], most: int
) -> list[list[int]]:
    """Tokens, `most` at most of each, of questions about the same passages, of which the last are
    cut where they do not fit."""

    def ids(context: str, question: str) -> list[int]:
        text = ASK.format(context, question)
        if getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        else:
            text += "\nAnswer:"
        return list(tokenizer(text, verbose=False).input_ids)

    around = max(len(ids("", question)) for question in questions)
    context = tokenizer("\n\n".join(passages), verbose=False).input_ids[
        : max(0, min(CONTEXT_TOKENS, most - around - 2))
    ]
    return [ids(tokenizer.decode(context), question) for question in questions]


def answer(model: Any, prompt: Sequence[int], cache: Any, begun: float) -> Answer:
    """Greedily. `begun`: when the question came, by `time.perf_counter`."""
    ids, watch = torch.tensor([prompt]), Watch()
    known = cache.reuse_prefix(ids) if isinstance(cache, KVCache) else 0
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=watch,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Answer(
        made.sequences[0, len(prompt) :].tolist(),
        [logits[0] for logits in made.logits],
        watch.times[1] - begun,
        known,
    )


def compare(model: Any, expected: Answer, found: Answer) -> tuple[bool, str]:
    """Whether an answer is that of the cache in memory, and how it was compared: token by token, up
    to where two tokens are so close in memory that rounding decides (docs/lossless.md); from there
    on the texts go apart."""
    pairs = list(zip(expected.tokens, found.tokens, strict=False))
    other = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    if other == len(pairs):
        is_same = len(expected.tokens) == len(found.tokens)
        return is_same, f"{len(pairs)} of {len(expected.tokens)}"
    logits = expected.logits[other]
    gap = float(logits.max() - logits[found.tokens[other]]) / float(logits.std())
    # each of the two may be off by as much
    tied = gap <= 2 * tolerance_of_other_shapes(model.config, "fp32")
    return (
        tied,
        (
            f"{other} of {len(expected.tokens)}; then two that are {gap:.1g} deviations "
            f"apart{', by rounding' if tied else ''}"
        ),
    )


def resume(job: Mapping[str, Any]) -> dict[str, Any]:
    """Does what the new process does, once it has loaded the model: the second question computed
    anew in memory, and from the kept cache."""
    model, tokenizer = load(job["model"])
    # what is set up at a model's first pass, neither way pays for
    model(torch.tensor([job["prompt"][:1]]))
    recomputed = answer(
        model, job["prompt"], DynamicCache(config=model.config), time.perf_counter()
    )
    begun = time.perf_counter()
    with KVCache(model.config, job["storage"], name=NAME) as cache:
        resumed = answer(model, job["prompt"], cache, begun)
        stats = cache.stats()
    is_same, how = compare(model, recomputed, resumed)
    return {
        "is_same": is_same,
        "how": how,
        "text": tokenizer.decode(resumed.tokens, skip_special_tokens=True),
        "known": resumed.known,
        "recomputed_s": recomputed.first_s,
        "resumed_s": resumed.first_s,
        "bytes_moved": stats["bytes_moved"],
        "effective_path": stats["effective_path"],
    }


def first_question(
    folder: Path, passages: Sequence[str], questions: Sequence[str], storage: str
) -> tuple[bool, list[int]]:
    """Answers it with a cache that is kept in `storage`, and prints what happened. Returns whether
    the tokens are those of the cache in memory, and the prompt of the second question."""
    model, tokenizer = load(folder)
    prompts = make_prompts(
        tokenizer, passages, questions, model.config.max_position_embeddings - NEW_TOKENS
    )
    expected = answer(model, prompts[0], DynamicCache(config=model.config), time.perf_counter())
    with KVCache(model.config, storage, name=NAME) as cache:
        found = answer(model, prompts[0], cache, time.perf_counter())
        stats = cache.stats()
    is_same, how = compare(model, expected, found)
    path = stats["effective_path"]
    rows = [
        (
            "prompt",
            f"{len(prompts[0]):,} tokens: {len(passages)} passages of documentation and a question",
        ),
        ("same tokens as in memory", f"{how} (transformers' DynamicCache)"),
        (
            "K and V",
            (
                f"{format_size(stats['stored_bytes'])} on SSD, "
                f"{format_size(stats['bytes_written'])} written, kept as {NAME!r}"
            ),
        ),
        (
            "bytes moved",
            f"{format_size(stats['bytes_moved'])} to read them, {stats['decode_tokens']:,} times",
        ),
        ("path", f"{path}; page cache bypassed: {'no' if 'buffered' in path else 'yes'}"),
    ]
    say(questions[0], tokenizer.decode(found.tokens, skip_special_tokens=True), rows)
    return is_same, prompts[1]


def second_question(folder: Path, question: str, prompt: Sequence[int], storage: str) -> bool:
    """Asks in a new process; prints what happened, and returns whether both ways gave the same
    tokens."""
    job = {"model": str(folder), "storage": storage, "prompt": list(prompt)}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return False
    found = json.loads(done.stdout)
    times = found["recomputed_s"] / found["resumed_s"]
    rows = [
        ("", "recomputed", "resumed from SSD"),
        (
            "time to first token",
            f"{found['recomputed_s']:.2f} s",
            f"{found['resumed_s']:.2f} s ({times:.1f}x sooner)",
        ),
        (
            "tokens read",
            f"{len(prompt):,}",
            f"{len(prompt) - found['known']:,}; {found['known']:,} were kept",
        ),
        ("bytes moved", "-", f"{format_size(found['bytes_moved'])}, {found['effective_path']}"),
        ("same tokens", "", found["how"]),
    ]
    say(question, found["text"], rows)
    return bool(found["is_same"])


def say(question: str, text: str, rows: Sequence[tuple[str, ...]]) -> None:
    print(f"Question: {question}\nAnswer: {' '.join(text.split())}\n")
    print(render_table([""] * len(rows[0]), rows))


if __name__ == "__main__":
    json.dump(resume(json.load(sys.stdin)), sys.stdout)
