"""What `Rag.ask` returns: the answer, the sources it stands on, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..storage.documents.ids import DocumentId
from ..tables import printable, render_table

_WORDS_SHOWN, _TEXT_SHOWN = 4, 60


@dataclass(frozen=True)
class MatchedWord:
    """A word of a sentence, and the one of a passage that says it.

    Attributes:
        word, passage_word: as they stand there, between white space.
        start_char, end_char: of the passage's word, in `Reference.text`.
        score: the product of their tokens' vectors.
    """

    word: str
    passage_word: str
    start_char: int
    end_char: int
    score: float


@dataclass(frozen=True)
class Support:
    """How much of a sentence a passage says (late interaction, Khattab and Zaharia 2020, between an
    answer's sentence and the passage it cites). Near words are no proof of a true statement.

    Attributes:
        sentence: of the answer, without its markers.
        maxsim: the sum over the sentence's tokens of their best product with a token of the
            passage, by the encoder of the index.
        mean: the same for one token: of vectors of length 1 at most 1.
        words: those that match best, the best first; empty where the encoder does not say which
            tokens are of which word.
    """

    sentence: str
    maxsim: float
    mean: float
    words: tuple[MatchedWord, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A source of an answer: a passage that stood in the prompt.

    Attributes:
        number: from 1, as in the prompt and in the answer's markers.
        passage: its id in the index.
        document, start_char, end_char: where it comes from: of passages that
            `espnx.chunk_documents` has cut the id of the whole document, as text, and the
            characters there; of any other the passage itself.
        score: the hit's.
        text: what stood in the prompt, without what was cut.
        is_cut: the end did not fit into the tokens of a passage or of the prompt.
        is_cited: the answer has its number.
        support: for each sentence that cites it.
        attention: which share of their attention the answer's tokens paid to it, where passages
            come from a `PassageKV`; else None. Where the model looked, and no proof.
        fingerprint: of the whole passage, for `Rag.check`.
    """

    number: int
    passage: DocumentId
    document: DocumentId
    start_char: int
    end_char: int
    score: float
    text: str
    is_cut: bool
    fingerprint: str
    is_cited: bool = False
    support: tuple[Support, ...] = ()
    attention: float | None = None


@dataclass(frozen=True)
class LeftOut:
    """A passage that was found and does not stand in the prompt: it is ``empty``, or there was ``no
    room``."""

    passage: DocumentId
    why: str


@dataclass
class AnswerTimings:
    """Seconds, wall clock.

    Attributes:
        retrieval_s: until the passages were known.
        prompt_s: numbering, counting and cutting them.
        waited_s: for other callers' turn at the model.
        first_token_s: from the beginning of the model's work to its first token; None where a
            function generates.
        generate_s: all of the model's work.
        support_s: finding the evidence.
        total_s: all of it.
    """

    retrieval_s: float = 0.0
    prompt_s: float = 0.0
    waited_s: float = 0.0
    first_token_s: float | None = None
    generate_s: float = 0.0
    support_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """An answer and what it stands on.

    Attributes:
        question: as it was asked.
        text: the answer; all numbers in its markers (``[2]``, ``[1, 3]``) are of `references`.
        references: the sources, by number.
        unknown_references: numbers that the model wrote and nothing has; they were taken out of the
            text.
        nothing_found: passages were wanted and there are none; the model was not asked.
        left_out: passages that were found and are not in the prompt.
        prompt_tokens, answer_tokens: as the model counts them, or, where a function generates, as
            `Rag` was told to count.
        is_unfinished: the answer ends because it had no more tokens.
        attention_heads: (layer, head), whose attention the references have; none: the mean of
            all, where they have any.
        reused: what a `PassageKV` says of the prompt's rows; None without one.
        timings: where the time went.
    """

    question: str
    text: str
    references: tuple[Reference, ...] = ()
    unknown_references: tuple[int, ...] = ()
    nothing_found: bool = False
    left_out: tuple[LeftOut, ...] = ()
    prompt_tokens: int = 0
    answer_tokens: int = 0
    is_unfinished: bool = False
    attention_heads: tuple[tuple[int, int], ...] = ()
    reused: Mapping[str, Any] | None = None
    timings: AnswerTimings = field(default_factory=AnswerTimings)

    @property
    def cited(self) -> tuple[Reference, ...]:
        """The references that the answer has the numbers of."""
        return tuple(each for each in self.references if each.is_cited)

    def summary(self) -> str:
        """The answer and its sources, several lines."""
        rows = [
            (
                f"[{each.number}]{'*' if each.is_cited else ''}",
                f"{each.document} {each.start_char}-{each.end_char}",
                f"{each.score:.2f}",
                "-" if not each.support else f"{max(s.mean for s in each.support):.2f}",
                "-" if each.attention is None else f"{each.attention:.0%}",
                _shown(each),
            )
            for each in self.references
        ]
        heads = ("", "source", "score", "support", "attention", "text")
        lines = [self.text]
        if rows:
            lines += ["", render_table(heads, rows, right=heads[2:5]), "* cited in the answer"]
        if self.unknown_references:
            numbers = ", ".join(map(str, self.unknown_references))
            lines.append(f"taken out of the answer: numbers of no source: {numbers}")
        lines += [f"not in the prompt ({each.why}): {each.passage}" for each in self.left_out]
        if self.is_unfinished:
            lines.append("the answer was ended by the limit of new tokens")
        spent = self.timings
        first = "" if spent.first_token_s is None else f", first token {spent.first_token_s:.2f} s"
        lines.append(
            f"{spent.total_s:.2f} s: retrieval {spent.retrieval_s:.2f}{first}, model "
            f"{spent.generate_s:.2f}, evidence {spent.support_s:.2f}; {self.prompt_tokens:,} "
            f"tokens in, {self.answer_tokens:,} out"
        )
        return printable("\n".join(lines))


def _shown(reference: Reference) -> str:
    words = [match for each in reference.support for match in each.words][:_WORDS_SHOWN]
    text = " ".join(reference.text.split())
    short = text if len(text) <= _TEXT_SHOWN else f"{text[: _TEXT_SHOWN - 3]}..."
    if reference.is_cut:
        short += " (cut)"
    matched = ", ".join(dict.fromkeys(match.passage_word for match in words))
    return f"{short} | {matched}" if matched else short
