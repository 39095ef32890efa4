"""What a vector and a posting take on the host: fitted on two shares that RAGX's section 2.4 has of
search in all of a query, where vectors and lists are in memory.

A file of its own: services are computed with what comes out, wherever that is from.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import InvalidInputError
from ..figures import Range, rounded
from .answer import answer
from .service import FITTED, load_preset_service

RETRIEVERS = ("bm25", "splade", "doc2vec", "colbert", "gtr")
#: By passages: what all five take in searching over what they take in all, of `ON`.
SHARES: Mapping[int, Range] = {
    5_000_000: rounded(0.24, 0.01, "RAGX section 2.4", "paper"),
    50_000_000: rounded(0.58, 0.01, "RAGX section 2.4", "paper"),
}
ON = "disag-dram"


def fit(values: Mapping[str, float], shares: Mapping[int, float]) -> dict[str, float]:
    """Seconds of a vector and of a posting with which those shares come out. Search is linear in
    both, so two shares give them.

    Raises InvalidInputError: no times above 0 do.
    """
    rows, missing_s = [], []
    for passages, share in shares.items():
        least_s, rest_s = _times({**values, FITTED[0]: 0.0, FITTED[1]: 0.0}, passages)
        with_vectors_s, _ = _times({**values, FITTED[0]: 1.0, FITTED[1]: 0.0}, passages)
        with_postings_s, _ = _times({**values, FITTED[0]: 0.0, FITTED[1]: 1.0}, passages)
        rows.append([with_vectors_s - least_s, with_postings_s - least_s])
        missing_s.append(share / (1 - share) * rest_s - least_s)
    # by hand, since what a library for equations makes of the last bits differs between processors
    (a, b), (c, d) = rows
    (e, f), under = missing_s, a * d - b * c
    found = [(e * d - b * f) / under, (a * f - e * c) / under]
    if not all(each > 0 for each in found):
        raise InvalidInputError(
            "the time of a vector and of a posting",
            got=", ".join(f"{each:.3g} s" for each in found),
            expected="above 0",
        )
    return dict(zip(FITTED, found, strict=True))


def _times(values: Mapping[str, float], passages: int) -> tuple[float, float]:
    """Seconds of searching and of all else, of a query of each retriever."""
    search_s = rest_s = 0.0
    for name in RETRIEVERS:
        found = answer(load_preset_service(ON, name).given(values), passages)
        search_s += found.search_share * found.serial_s
        rest_s += (1 - found.search_share) * found.serial_s
    return search_s, rest_s
