#!/usr/bin/env python3
"""A labelled collection that every machine can make: known items among near duplicates.

The known items are docstrings of the installed Python libraries (scripts/docstrings.py). Beside
each stand ten copies in which one word in six is another one, drawn from the other items. A query
is eight words of a known item, in their order; the item alone is relevant. What ranks it above its
copies is whether single tokens are told apart, which is what lossy records lose first.

    python scripts/near_duplicates.py --out duplicates
    espnx bench retrieval --path /mnt/nvme --show formats --dataset duplicates
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import docstrings

COPIES = 10
WORDS_IN_QUERY = 8
WORDS_MIN, CHARS_MAX = 40, 700
CHANGED_SHARE = 6  # one word in so many
PACKAGES = (
    "json",
    "asyncio",
    "email",
    "http",
    "logging",
    "multiprocessing",
    "numpy",
    "unittest",
    "urllib",
    "xml",
    "torch",
)
WORD = re.compile(r"[A-Za-z]{3,}")


@dataclass(frozen=True)
class Collection:
    """Texts by id, queries by id, and which document is relevant for each query."""

    corpus: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, str]


def make(texts: Iterable[tuple[str, str]], items: int, seed: int = 0) -> Collection:
    """The same collection for the same texts, number of items and seed."""
    rng = random.Random(seed)
    usable = [
        (name, " ".join(text.split()))
        for name, text in texts
        if len(WORD.findall(text)) >= WORDS_MIN and len(text) <= CHARS_MAX
    ]
    chosen = rng.sample(usable, min(items, len(usable)))
    vocabulary = sorted({word for _, text in chosen for word in WORD.findall(text)})
    corpus, queries, relevant = {}, {}, {}
    for number, (name, text) in enumerate(chosen):
        corpus[name] = text
        for copy in range(COPIES):
            corpus[f"{name}~{copy}"] = changed(text, vocabulary, rng)
        words = WORD.findall(text)
        queries[f"q{number}"] = " ".join(
            words[at] for at in sorted(rng.sample(range(len(words)), WORDS_IN_QUERY))
        )
        relevant[f"q{number}"] = name
    shuffled = list(corpus.items())
    rng.shuffle(shuffled)
    return Collection(dict(shuffled), queries, relevant)


def changed(text: str, vocabulary: list[str], rng: random.Random) -> str:
    """A copy with other words in some places."""
    places = list(WORD.finditer(text))
    for match in sorted(
        rng.sample(places, len(places) // CHANGED_SHARE), key=lambda match: -match.start()
    ):
        text = text[: match.start()] + rng.choice(vocabulary) + text[match.end() :]
    return text


def write(found: Collection, folder: Path) -> None:
    """corpus.jsonl, queries.jsonl and qrels.tsv, as BEIR has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("corpus", found.corpus), ("queries", found.queries)):
        lines = (
            json.dumps({"_id": identifier, "text": text}) + "\n"
            for identifier, text in texts.items()
        )
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    rows = [f"{query}\t{document}\t1\n" for query, document in found.relevant.items()]
    (folder / "qrels.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(rows), encoding="utf-8"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Known items among near duplicates, from docstrings."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--items", type=int, default=150, help="known items (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    installed = set().union(*map(docstrings.packages_of, docstrings.default_roots()))
    texts = (
        (item["id"], item["text"])
        for item in docstrings.documents(packages=[name for name in PACKAGES if name in installed])
    )
    found = make(texts, options.items, options.seed)
    write(found, options.out)
    print(f"{len(found.queries)} queries, {len(found.corpus):,} documents in {options.out}")
    return 0 if found.queries else 1


if __name__ == "__main__":
    raise SystemExit(main())
