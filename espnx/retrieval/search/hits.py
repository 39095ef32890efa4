"""From scores to hits: the k best, with their ids and texts, and why each was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...storage.documents.ids import DocumentId, id_order
from ..first_stage.fusion import fuse
from ..first_stage.interface import Candidates
from ..store.store import EmbeddingStore
from ..store.tier import Tier
from .options import SearchOptions
from .result import Hit, StageRank, TokenMatch

#: (id, text) of record numbers.
Texts = Callable[[Sequence[int]], list[tuple[DocumentId, str]]]


@dataclass(frozen=True)
class ScoredCandidates:
    """One query's candidates in first-stage order (coarse order in a cascade), and exact scores of
    the first `depth` of them."""

    numbers: np.ndarray
    similarities: np.ndarray
    exact: np.ndarray
    hit_rate: float


def rank(
    candidates: ScoredCandidates, k: int, texts: Texts
) -> tuple[np.ndarray, np.ndarray, int, dict[int, tuple[DocumentId, str]]]:
    """The k best: those scored exactly first, then the others. Equal scores are in the order of
    ids, whatever the records' numbers are.

    Returns (record numbers, scores, how many of them are exact, (id, text) of those that had to be
    looked up because of a tie).
    """
    depth, known = len(candidates.exact), dict[int, tuple[DocumentId, str]]()
    numbers, scores = _best(candidates.numbers[:depth], candidates.exact, k, texts, known)
    others, similarities = _best(
        candidates.numbers[depth:], candidates.similarities[depth:], k - len(numbers), texts, known
    )
    return (
        np.concatenate([numbers, others]),
        np.concatenate([scores, similarities]),
        len(numbers),
        known,
    )


def _best(
    numbers: np.ndarray,
    scores: np.ndarray,
    k: int,
    texts: Texts,
    known: dict[int, tuple[DocumentId, str]],
) -> tuple[np.ndarray, np.ndarray]:
    """(record numbers, scores) of the k best. Only documents that share their score with another
    one are looked up."""
    order = np.argsort(-scores, kind="stable")
    numbers, scores = numbers[order], scores[order]
    # What has the score of the last one that is taken may be taken in its place.
    end = (
        int(np.searchsorted(-scores, -scores[k - 1], side="right"))
        if 0 < k < len(scores)
        else min(k, len(scores))
    )
    numbers, scores = numbers[:end], scores[:end]
    is_next_equal = scores[1:] == scores[:-1]
    if not is_next_equal.any():
        return numbers[:k], scores[:k]
    tied = np.flatnonzero(np.r_[False, is_next_equal] | np.r_[is_next_equal, False])
    wanted = numbers[tied].tolist()
    known |= zip(wanted, texts(wanted), strict=True)
    by_id = sorted(
        range(len(tied)), key=lambda i: (-scores[tied[i]], id_order(known[wanted[i]][0]))
    )
    numbers = numbers.copy()
    numbers[tied] = [wanted[i] for i in by_id]
    return numbers[:k], scores[:k]


def hits_of(
    store: EmbeddingStore,
    candidates: ScoredCandidates,
    tokens: torch.Tensor,
    options: SearchOptions,
    by_stage: Mapping[str, Candidates],
) -> list[Hit]:
    """The hits of a query with these tokens. `by_stage`: what each first stage found.

    Raises InvalidInputError for scores that are not finite, and what reads raise."""
    for scores in (candidates.exact, candidates.similarities):
        if not np.isfinite(scores).all():
            got = f"a score of {scores[~np.isfinite(scores)][0]}"
            raise errors.InvalidInputError(
                "query vectors",
                got=got,
                expected="scores that float32 can hold",
                fix="smaller vectors",
            )
    if options.fuses_maxsim:
        by_stage, candidates = _with_maxsim(candidates, by_stage)
    chosen, values, exact, known = rank(candidates, options.k, store.texts.get)
    missing = [number for number in chosen.tolist() if number not in known]
    known |= zip(missing, store.texts.get(missing), strict=True)
    matches: Sequence[Any] = [None] * len(chosen)
    if options.explain and len(chosen):
        matches = token_matches(store.full, chosen, tokens, options.deadline_s)
    return [
        Hit(
            id=known[number][0],
            score=value,
            text=known[number][1],
            number=number,
            reranked="maxsim" in said if options.fuses_maxsim else i < exact,
            matches=found,
            found_by=said,
        )
        for i, (number, value, found) in enumerate(
            zip(chosen.tolist(), values.tolist(), matches, strict=True)
        )
        for said in [_found_by(number, by_stage)]
    ]


def _with_maxsim(
    candidates: ScoredCandidates, by_stage: Mapping[str, Candidates]
) -> tuple[Mapping[str, Candidates], ScoredCandidates]:
    """(what each stage found, and MaxSim; the union of it all, by the fused ranks alone)"""
    order = np.argsort(-candidates.exact, kind="stable")
    lists = {
        **by_stage,
        "maxsim": (candidates.numbers[: len(order)][order], candidates.exact[order]),
    }
    fused = fuse(list(lists.values()))
    return lists, ScoredCandidates(
        fused.numbers, fused.scores, np.empty(0, np.float32), candidates.hit_rate
    )


def _found_by(number: int, by_stage: Mapping[str, Candidates]) -> dict[str, StageRank]:
    """What the stages said of a record, where they found it."""
    said = {}
    for kind, (numbers, similarities) in by_stage.items():
        place = np.flatnonzero(numbers == number)
        if len(place):
            score = similarities[place[0]]
            said[kind] = StageRank(1 + int(np.count_nonzero(similarities > score)), float(score))
    return said


def token_matches(
    tier: Tier, numbers: np.ndarray, tokens: torch.Tensor, deadline_s: float
) -> list[tuple[TokenMatch, ...]]:
    """Reads the records once more and matches them with a query's tokens (float32 [Lq, dim]). Among
    equal products the first token.

    Raises what the reads raise, and ChecksumError or StaleDataError.
    """
    if not len(tokens):
        return [()] * len(numbers)
    future = tier.read(numbers, gap_bytes=0, deadline_s=deadline_s)
    memory = future.wait()
    tier.check(memory, future.position_bytes, numbers)
    schema = tier.schema
    result: list[tuple[TokenMatch, ...]] = []
    for number, position in zip(numbers.tolist(), future.position_bytes.tolist(), strict=True):
        n_tokens = int(tier.n_tokens[number])
        begin = position + schema.fixed_bytes
        rows = memory[begin : begin + n_tokens * schema.row_bytes].cpu()
        if not n_tokens:
            result.append(())
            continue
        products = tokens.cpu() @ schema.decode(rows, tier.codebook).T
        best = products.argmax(dim=1)
        scores = products.gather(1, best[:, None])[:, 0]
        result.append(
            tuple(
                TokenMatch(q, t, s)
                for q, (t, s) in enumerate(zip(best.tolist(), scores.tolist(), strict=True))
            )
        )
    return result
