"""Evidence for cited sentences: MaxSim between a sentence and the passage it cites, by the encoder
of the index, and the words that it comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ..retrieval.encoder import Encoder
from .answer import MatchedWord, Reference, Support
from .markers import CitedSentence

_WORD = re.compile(r"\S+")
_WORDS_SHOWN = 8


def supports(
    encoder: Encoder, sentences: Sequence[CitedSentence], references: Sequence[Reference]
) -> dict[int, tuple[Support, ...]]:
    """The evidence of each cited reference, by number: for each sentence that cites it. Each
    sentence and passage is encoded once."""
    pairs = [(i, number) for i, each in enumerate(sentences) for number in each.numbers]
    wanted = sorted({number for _, number in pairs})
    if not wanted:
        return {}
    texts = {each.number: each.text for each in references}
    asked = encoder.encode_queries([each.text for each in sentences])
    passages = dict(zip(wanted, encoder.encode_documents([texts[n] for n in wanted]), strict=True))
    found: dict[int, tuple[Support, ...]] = {}
    for i, number in pairs:
        support = _support(
            encoder, sentences[i].text, asked[i].tokens, texts[number], passages[number].tokens
        )
        found[number] = (*found.get(number, ()), support)
    return found


def _support(
    encoder: Encoder, sentence: str, tokens: torch.Tensor, passage: str, rows: torch.Tensor
) -> Support:
    """`tokens` [n, dim] of the sentence, `rows` [m, dim] of the passage."""
    if not len(tokens) or not len(rows):
        return Support(sentence, 0.0, 0.0)
    best, at = (tokens @ rows.T).max(dim=1)
    maxsim = float(best.double().sum())
    return Support(
        sentence,
        maxsim,
        maxsim / len(tokens),
        _matched(
            _words_of_tokens(encoder, sentence, len(tokens)),
            _words_of_tokens(encoder, passage, len(rows)),
            best.tolist(),
            at.tolist(),
        ),
    )


def _matched(
    words: list[re.Match[str]] | None,
    passage_words: list[re.Match[str]] | None,
    scores: list[float],
    at: list[int],
) -> tuple[MatchedWord, ...]:
    """Each word of the sentence once, by the best of its tokens."""
    if words is None or passage_words is None:
        return ()
    best: dict[int, MatchedWord] = {}
    for word, score, place in zip(words, scores, at, strict=True):
        other = passage_words[place]
        if word.start() not in best or score > best[word.start()].score:
            best[word.start()] = MatchedWord(word[0], other[0], other.start(), other.end(), score)
    return tuple(sorted(best.values(), key=lambda each: -each.score)[:_WORDS_SHOWN])


def _words_of_tokens(encoder: Any, text: str, count: int) -> list[re.Match[str]] | None:
    """The word of each of `count` tokens; None where that is not known. Encoders with `wordpieces`
    say how many a word has; of others a token may be a word. Either must come out at the same
    number of tokens: some encoders leave tokens out, or add some."""
    words = list(_WORD.finditer(text))
    if len(words) == count:
        return words
    pieces = getattr(encoder, "wordpieces", None)
    if pieces is None:
        return None
    counts = [len(ids) for ids in pieces([word[0] for word in words])]
    if sum(counts) != count:
        return None
    return [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
