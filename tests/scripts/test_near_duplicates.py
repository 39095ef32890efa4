"""The collection of near duplicates: what it holds, that it comes out the same again, and the
files."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import near_duplicates

WORDS = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=7)) for i in range(300)]


def texts() -> list[tuple[str, str]]:
    """Eight that may be known items, one too short, one too long."""
    rng = random.Random(1)
    usable = [(f"pkg.f{i}", " ".join(rng.choices(WORDS, k=60))) for i in range(8)]
    return [*usable, ("pkg.short", "only a few words"), ("pkg.long", "word " * 200)]


def test_known_items_among_copies() -> None:
    given = dict(texts())
    found = near_duplicates.make(texts(), 6)
    assert found == near_duplicates.make(texts(), 6)
    assert found.corpus != near_duplicates.make(texts(), 6, seed=1).corpus
    assert (len(found.corpus), len(found.queries), len(set(found.relevant.values()))) == (66, 6, 6)
    for query, text in found.queries.items():
        item = found.relevant[query]
        original = given[item].split()
        assert found.corpus[item] == given[item]
        words = iter(original)
        assert len(text.split()) == near_duplicates.WORDS_IN_QUERY
        assert all(word in words for word in text.split()), "not words of the item in their order"
        copies = [
            text.split() for name, text in found.corpus.items() if name.startswith(f"{item}~")
        ]
        assert len(copies) == near_duplicates.COPIES
        for copy in copies:
            changed = sum(a != b for a, b in zip(original, copy, strict=True))
            assert 0 < changed <= len(original) // near_duplicates.CHANGED_SHARE
            assert set(copy) <= {
                word for name in found.relevant.values() for word in given[name].split()
            }


def test_all_there_are() -> None:
    """Fewer texts than known items were asked for; those of other lengths are never taken."""
    assert sorted(near_duplicates.make(texts(), 100).relevant.values()) == [
        f"pkg.f{i}" for i in range(8)
    ]
    assert near_duplicates.make(texts()[8:], 100).corpus == {}


def test_files(tmp_path: Path) -> None:
    found = near_duplicates.make(texts(), 6)
    near_duplicates.write(found, tmp_path / "data")
    for name, expected in (("corpus", found.corpus), ("queries", found.queries)):
        lines = (tmp_path / f"data/{name}.jsonl").read_text().splitlines()
        assert {item["_id"]: item["text"] for item in map(json.loads, lines)} == expected
    head, *rows = (tmp_path / "data/qrels.tsv").read_text().splitlines()
    assert head == "query-id\tcorpus-id\tscore"
    assert [row.split("\t") for row in rows] == [
        [query, item, "1"] for query, item in found.relevant.items()
    ]
