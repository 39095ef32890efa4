"""Caches of one model behind the same prompt, and what was kept of a context taken up by a new
process."""

from __future__ import annotations

import itertools
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from espnx.integrations.transformers.gguf import find_gguf

from ..harness.registry import Say
from ..harness.result import Row
from ..kv.resume import text_tokens
from ..kv.systems import smollm2
from .programs import ask, chosen, row_of, shown

REFERENCE = "dynamic"
LOSSLESS = ("espnx", "offloaded", "accelerate-disk")  # the tokens must be the reference's
KEEPERS = ("espnx", "llama-cpp")
SYSTEMS = (
    REFERENCE,
    "espnx",
    "espnx-int8",
    "quanto-4",
    "quanto-8",
    "hqq-8",
    "offloaded",
    "accelerate-disk",
    "llama-cpp",
)
QUESTIONS = ("What is this text about?", "Which statement of the language is described first?")
RUNS = 3


def measure(args: Namespace, say: Say) -> list[Row]:
    """A row for each system's decoding, and for each that keeps a context. Raises
    MissingDependencyError."""
    with tempfile.TemporaryDirectory(prefix="head-to-head-", dir=args.path) as scratch:
        job = _job(args, Path(scratch), say)
        params = {
            "model": Path(job["model"]).name,
            "dtype": "fp32",
            "new": args.new,
            "limit_s": args.time_limit,
        }
        found, truth = list[Row](), list[int]()
        for system in chosen(args, SYSTEMS):
            answer = _asked(args, {**job, "system": system, "do": "decode"}, Path(scratch), say)
            tokens = answer.get("tokens", [])
            truth = truth or tokens
            same = sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(truth, tokens, strict=False)
                )
            )
            metrics = {
                name: float(answer[name])
                for name in ("first_s", "held_bytes", "mapped_bytes", "cache_bytes")
                if name in answer
            }
            right = "why" in answer or system not in LOSSLESS or same == args.new
            point = {**params, "job": "decode", "context": len(job["prompts"][0])}
            found.append(
                row_of(
                    point,
                    system,
                    answer,
                    metrics | ({"same_tokens": float(same)} if tokens else {}),
                    correct=right,
                )
            )
            say(shown(found[-1]))
        for system in chosen(args, SYSTEMS):
            if system in KEEPERS:
                found.append(_resumed(args, {**job, "system": system}, params, Path(scratch), say))
    return found


def _resumed(
    args: Namespace, job: dict[str, Any], params: dict[str, Any], scratch: Path, say: Say
) -> Row:
    answer = _asked(args, {**job, "do": "keep"}, scratch, say)
    if "why" not in answer:
        answer = _asked(args, {**job, "do": "resume"}, scratch, say)
    metrics, is_same = {}, True
    if "why" not in answer:
        anew = sorted(answer["anew"])[len(answer["anew"]) // 2]
        is_same = bool(answer["is_same"])
        metrics = {
            "recomputed_s": anew,
            "known": float(answer["known"]),
            "kept_bytes": float(answer["kept_bytes"]),
            "same": float(is_same),
        }
    row = row_of(
        {**params, "job": "resume", "context": len(job["prompts"][1])},
        job["system"],
        answer,
        metrics,
        correct=is_same,
    )
    say(shown(row))
    return row


def _asked(args: Namespace, job: dict[str, Any], scratch: Path, say: Say) -> dict[str, Any]:
    """Asks in a directory of its own for what is stored, which the resuming process finds again."""
    say(f"{job['system']}: {job['do']}")
    storage = scratch / job["system"]
    storage.mkdir(exist_ok=True)
    # the others' tokens are compared with its
    limit_s = None if job["system"] == REFERENCE else args.time_limit
    return ask(
        "kv", Path(args.environments), {**job, "storage": str(storage)}, scratch, limit_s=limit_s
    )


def _job(args: Namespace, scratch: Path, say: Say) -> dict[str, Any]:
    from transformers import AutoTokenizer

    model, gguf = args.model, None
    if model is None:
        folder = scratch / smollm2.NAME
        say(f"{smollm2.NAME} becomes a folder")
        smollm2.write_folder(folder)
        model, gguf = folder, find_gguf(smollm2.package_folder())
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    context = text_tokens(tokenizer, 256 if args.quick else args.context).tolist()
    prompts = [
        [*context, *tokenizer(f"\n\nQuestion: {question}\nAnswer:", verbose=False).input_ids]
        for question in QUESTIONS
    ]
    return {
        "model": str(model),
        "gguf": str(gguf),
        "prompts": prompts,
        "context": len(context),
        "new": args.new,
        "runs": RUNS,
    }
