"""A process that generates with a KV cache whose device stalls, for tests that interrupt or kill it. Arguments: the directories.

Prints `stalled` when a read hangs. On Ctrl-C it goes on with the same cache and prints, as JSON, how it came out.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import torch

from espnx.integrations.transformers import KVCache
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.kv_models import enabled, expected, generate, prompt

LENGTHS = [21, 20]


def main(directories: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts its children in the background has it ignored
    wanted = expected("llama", LENGTHS)
    made: list[FaultyEngine] = []

    def engine() -> FaultyEngine:
        made.append(FaultyEngine([FaultRule("never", operation="read", nth=7, count=1)]))
        return made[-1]

    def watch() -> None:
        while not sum(each.stats().fault_hits for each in made):
            time.sleep(0.01)
        print("stalled", flush=True)

    with KVCache(enabled("llama").config, directories, engine=engine, deadline_s=60.0) as cache:
        threading.Thread(target=watch, daemon=True).start()
        inputs = prompt(LENGTHS)
        interrupted_s = 0.0
        for _ in range(4):
            try:
                got = generate(enabled("llama"), inputs, cache, max_new_tokens=wanted.shape[1] - inputs["input_ids"].shape[1])
                break
            except KeyboardInterrupt:
                interrupted_s = time.time()
                ids = cache.tokens
                assert ids is not None
                more = torch.ones(len(ids), ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.long)
                inputs = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], more], dim=1)}
        ended = time.time()
    for each in made:
        each.close(grace_s=0.01)
    print(json.dumps({"equal": torch.equal(got, wanted), "interrupted_s": interrupted_s, "went_on_s": ended - interrupted_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
