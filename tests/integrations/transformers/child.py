"""Generation with a KV cache whose device stalls, in a process that tests interrupt or kill (a job
of forks.py)."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import torch

from espnx.integrations.transformers.cache import KVCache
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.tiny import enabled, expected, generate, prompt

LENGTHS = [21, 20]
NEVER = FaultRule("never", operation="read", nth=7, count=1)


def interrupted(storage: list[str], stalled: str, result: str) -> int:
    """Makes the file `stalled` when a read hangs. On Ctrl-C it continues with the same cache and
    writes to `result`, as JSON, how it came out."""
    wanted = expected("llama", LENGTHS)
    made: list[FaultyEngine] = []

    def engine() -> FaultyEngine:
        # one device alone: nobody interrupts what stalls after the interruption
        made.append(FaultyEngine([] if made else [NEVER]))
        return made[-1]

    def watch() -> None:
        while not sum(each.stats().fault_hits for each in made):
            time.sleep(0.01)
        Path(stalled).touch()

    with KVCache(enabled("llama").config, storage, engine=engine, deadline_s=90.0) as cache:
        threading.Thread(target=watch, daemon=True).start()
        inputs = prompt(LENGTHS)
        interrupted = False
        for _ in range(4):
            try:
                got = generate(
                    enabled("llama"),
                    inputs,
                    cache,
                    max_new_tokens=wanted.shape[1] - inputs["input_ids"].shape[1],
                )
                break
            except KeyboardInterrupt:
                interrupted = True
                ids = cache.tokens
                assert ids is not None
                if cache.get_seq_length() == ids.shape[1]:
                    # between two passes: the next token is not known yet, and something must be fed
                    cache.crop(-1)
                more = torch.ones(
                    len(ids), ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.long
                )
                inputs = {
                    "input_ids": ids,
                    "attention_mask": torch.cat([inputs["attention_mask"], more], dim=1),
                }
    for each in made:
        each.close(grace_s=0.01)
    Path(result).write_text(
        json.dumps({"equal": torch.equal(got, wanted), "interrupted": interrupted})
    )
    return 0
