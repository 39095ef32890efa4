"""One search, every step in view, on the pieces that `Index.search` is made of.

    python examples/04_search_by_hand.py "read a line from the user"

Builds a small index of Python's own documentation, ranks it by hand, and compares with what the
index answers.
"""

from __future__ import annotations

import builtins
import sys
import tempfile

import numpy as np
import torch

import espnx
from espnx.ops.maxsim import maxsim
from espnx.retrieval.store.record import HEADER_BYTES

QUESTION, ANSWERS = "sort a list in place", ["list.sort", "sorted"]


def documents() -> list[tuple[str, str]]:
    """The methods of Python's own types, by name, with what is written about them."""
    methods = [
        (f"{kind.__name__}.{name}", getattr(kind, name))
        for kind in (str, bytes, dict, list, set)
        for name in dir(kind)
    ]
    functions = [(name, getattr(builtins, name)) for name in dir(builtins)]
    named = [
        (name, each.__doc__)
        for name, each in methods + functions
        if not name.split(".")[-1].startswith("_")
    ]
    # each text once
    return [(name, text) for text, name in {text: name for name, text in named if text}.items()]


def search_by_hand(
    index: espnx.Index, text: str, k: int = 5, candidates: int = 40
) -> list[tuple[str | int, float]]:
    """(id, score) of the k best documents."""
    store, stage, records = index.store, index.first_stage, index.store.full
    # 1. A text becomes one CLS vector and one vector for each token.
    query = index.encoder.encode_queries([text])[0]
    # 2. The first stage names candidates. What it knows after a third of its work is already being
    #    read while it does the rest.
    search = stage.start([stage.prepare(query, text)], candidates, at_least=candidates)
    early = np.sort(search.advance(0.3)[0][0])
    reads = [(early, records.read(early, gap_bytes=4096))]
    wanted = np.sort(search.complete()[0][0])
    late = np.setdiff1d(wanted, early)
    reads.append((late, records.read(late, gap_bytes=4096)))
    # 3. Records are scored where they arrived, once their checksums say that they are whole and the
    #    right ones.
    schema, scores = store.full.schema, dict[int, float]()
    for numbers, read in reads:
        memory, at = read.wait(), read.position_bytes
        records.check(memory, at, numbers)
        n_tokens = torch.from_numpy(store.n_tokens[numbers].astype(np.int64))
        # A record is a header, the CLS vector, and the tokens' rows. MaxSim reads the rows in place
        # ...
        tokens = schema.query_tokens(query.tokens)
        total = maxsim(tokens, memory, at + schema.fixed_bytes, n_tokens, format=schema.format)
        # ... and a CLS vector is a document of one token.
        cls, one = schema.query_cls(query.cls.reshape(1, -1)), torch.ones_like(n_tokens)
        total += store.manifest.cls_weight * maxsim(
            cls, memory, at + HEADER_BYTES, one, format=schema.cls_format
        )
        scores |= zip(numbers.tolist(), total.tolist(), strict=True)
    # 4. The best k of both reads, and what they are called.
    best = sorted(wanted.tolist(), key=lambda number: (-scores[number], number))[:k]
    return [
        (identifier, scores[number])
        for number, (identifier, _) in zip(best, store.texts.get(best), strict=True)
    ]


def main() -> None:
    text = " ".join(sys.argv[1:]) or QUESTION
    encoder = espnx.load_encoder("minilm")
    with tempfile.TemporaryDirectory() as folder:
        espnx.build(f"{folder}/index", documents(), encoder)
        with espnx.open(f"{folder}/index", encoder) as index:
            by_hand = search_by_hand(index, text)
            for identifier, score in by_hand:
                print(f"{score:8.4f}  {identifier}")
            if text == QUESTION:
                assert [identifier for identifier, _ in by_hand[:2]] == ANSWERS
            hits = index.search(text, k=5, candidates=40).hits
            assert [identifier for identifier, _ in by_hand] == [hit.id for hit in hits], hits


if __name__ == "__main__":
    main()
