"""Folders of BEIR: ``corpus.jsonl``, ``queries.jsonl``, and judgements in ``qrels/SPLIT.tsv``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..checks import check_path
from ..errors import InvalidInputError
from ..retrieval.evaluate import read_qrels
from ..suggestions import suggests_keywords
from .corpus import Corpus
from .queries import read_queries

_COMPRESSED = ("", ".gz")


@dataclass(frozen=True)
class BeirFolder:
    """A test collection.

    Attributes:
        corpus: documents, as `espnx.build` takes them, one in memory at a time.
        queries: those that are judged, by id, in the order of their file.
        qrels: query -> document -> relevance.
    """

    corpus: Corpus
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]


@suggests_keywords
def read_beir(folder: str | os.PathLike[str], split: str = "test") -> BeirFolder:
    """A test collection in BEIR's form.

    Args:
        folder: with ``corpus.jsonl`` (or ``corpus.jsonl.gz``), ``queries.jsonl``, and
            ``qrels/SPLIT.tsv``; or with one ``qrels.tsv``.
        split: whose judgements: ``test``, ``dev``, ``train``.

    Raises:
        InvalidInputError: a file is missing or is not what its name says, or no query of the split
            is among the queries; says which.
    """
    root = Path(check_path("BEIR folder", folder))
    if not isinstance(split, str) or not split or Path(split).name != split:
        raise InvalidInputError(
            "split of a BEIR folder", got=repr(split), expected="the name of a file in qrels/"
        )
    corpus = _first(root, [f"corpus.jsonl{end}" for end in _COMPRESSED])
    judged = _first(
        root, [f"qrels/{split}.tsv", *(["qrels.tsv"] if not (root / "qrels").is_dir() else [])]
    )
    qrels = read_qrels(str(judged))
    queries = {
        name: text
        for name, text in read_queries(str(_first(root, ["queries.jsonl"]))).items()
        if name in qrels
    }
    if not queries:
        raise InvalidInputError(
            f"BEIR folder {root}",
            got=f"no query that {judged.name} judges",
            expected="queries of that split",
        )
    return BeirFolder(Corpus(corpus), queries, qrels)


def _first(root: Path, names: list[str]) -> Path:
    for name in names:
        if (root / name).is_file():
            return root / name
    there = sorted(
        path.relative_to(root).as_posix() for path in [*root.glob("*"), *root.glob("qrels/*")]
    )[:12]
    got = ("nothing" if not there else ", ".join(there)) if root.is_dir() else "no such folder"
    raise InvalidInputError(f"BEIR folder {root}", got=got, expected=" or ".join(names))
