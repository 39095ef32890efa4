"""Prompts, and results that an earlier run wrote: what is mutated, and what is done with it (see
trials.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from espnx.integrations.generate.prompt_files import append, read_done, read_prompts
from tests.mutations.trials import Trial, mutated, put

PROMPTS, RESULTS = "p.jsonl", "p.jsonl.out.jsonl"
SETTINGS = {"model_fingerprint": "0123456789abcdef", "max_new_tokens": 8, "temperature": 0.5}
_LINES: list[bytes] = [
    b"", b"\0", b"null", b"[]", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000,
    b"\xff\xfe", b'{"id": "1"}', b"\xe2\x80\xa8", b'{"id": 1e999}', b'{"prompt": "\\ud800"}',
    b'{"id": ' + b"9" * 5000 + b', "prompt": "x"}', b'{"id": "\\ud800", "prompt": "x"}',
]  # fmt: skip


def make(path: Path) -> None:
    (path / PROMPTS).write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"text of {i}"}) + "\n" for i in range(3))
    )
    known = read_prompts(path / PROMPTS)
    append(
        path / RESULTS,
        [
            {"id": each.id, "prompt_digest": each.digest, "settings": SETTINGS, "text": "so"}
            for each in known[:2]
        ],
    )


def use(path: Path) -> Any:
    """As `espnx generate` begins; then it goes on, and reads what it wrote."""
    known = read_prompts(path / PROMPTS)
    done = read_done(path / RESULTS, SETTINGS, known)
    left = [each for each in known if each.id not in done]
    append(
        path / RESULTS,
        [
            {"id": each.id, "prompt_digest": each.digest, "settings": SETTINGS, "text": "so"}
            for each in left
        ],
    )
    again = read_done(path / RESULTS, SETTINGS, known)
    return [(each.id, each.text) for each in known], sorted({each.id for each in known} - again)


def _changed(name: str) -> Callable[[Path], Iterator[tuple[str, Callable[[Path], None]]]]:
    def changes(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
        lines = (sound / name).read_bytes().splitlines(keepends=True)
        for what, value in mutated(json.loads(lines[0])):
            yield what, put(name, b"".join([json.dumps(value).encode() + b"\n", *lines[1:]]))
        for i, line in enumerate(_LINES):
            for at in range(len(lines) + 1):
                yield (
                    f"line {at}: {line[:20]!r}",
                    put(name, b"".join([*lines[:at], line + b"\n", *lines[at:]])),
                )
            yield f"after the end: {i} {line[:20]!r}", put(name, b"".join(lines) + line)
        for size in range(0, len(lines[0]), 3):
            yield f"{size} bytes", put(name, lines[0][:size])

    return changes


GENERATION = {
    "prompts": Trial(make, _changed(PROMPTS), use, is_content=True),
    "results": Trial(make, _changed(RESULTS), use),
}
