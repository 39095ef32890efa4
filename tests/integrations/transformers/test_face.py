"""What users of a `KVCache` see: its public methods, what it says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Cache

from espnx.integrations.transformers.cache import KVCache
from tests.integrations.transformers.tiny import enabled, generate, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = {"close", "decision", "lengths", "reuse_prefix", "save", "stats", "summary", "tokens"}
ASKED_BY_PEFT = {"max_cache_len"}


def test_only_what_users_call_is_public() -> None:
    assert {name for name in vars(KVCache) if not name.startswith("_")} - set(
        dir(Cache)
    ) == OWN | ASKED_BY_PEFT


def test_what_it_says_of_itself(folder: Path) -> None:
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=0) as cache:
        assert repr(cache) == f"<KVCache: 0 sequences of 0 tokens in {folder}>"
        assert "effective path" in cache.summary(), "before there is anything to tell"
        generate(model, prompt([37, 20]), cache)
        held = cache.get_seq_length()
        assert repr(cache) == f"<KVCache: 2 sequences of {held} tokens in {folder}>"
        rows = dict(line.split("  ", 1) for line in cache.summary().splitlines())
        assert rows["directories"].strip() == str(folder)
        assert rows["holds"].strip() == f"2 sequences of {held} tokens, {len(cache.layers)} layers"
        assert rows["decode"].strip().startswith(f"{2 * (held - 37)} tokens")
    assert repr(cache) == "<KVCache: closed>"
    with KVCache(model.config, folder, name="kept", x_rows=0) as kept:
        assert repr(kept).startswith("<KVCache 'kept': 0 sequences")
