"""The loop: tokens are proposed for every sequence of a batch, one pass decides on all of them, and
each sequence keeps its own number.

Position p of the cache is token p of a sequence, whatever its neighbours accept. The pass's new
tokens stand behind the longest sequence, and what lies between is hidden by the mask; those that a
sequence keeps move to its own end, in memory, where they wait until all sequences have come so far
that they can be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .... import errors
from ....device.interface import DeviceStats
from ....kv.attention import CHUNK_TOKENS
from ....kv.draft.acceptance import drawn, next_token
from ....kv.draft.lookup import continuation
from ....kv.draft.rows import tier_of
from ....kv.draft.sources import LOOKUP, Sources, would_bring
from ....kv.draft.tally import PACKED, Tally
from ..cache import KVCache
from ..forward.positions import learned_positions
from .assistant import Assistant
from .draft import Draft
from .processors import processors_of
from .undecided import Undecided

#: A sequence that is so many tokens ahead of the slowest goes on one by one until they have come
#: nearer: what it has more waits in memory.
_LEAD_TOKENS = 128


@dataclass(frozen=True)
class Rules:
    """How tokens are decided, and when a text ends.

    Attributes:
        processors: of logits.
        criteria: for stopping.
        is_sampled: tokens are drawn.
        pad: the token behind a text that has ended before others; None: there is one text.
        max_length: of a text, in tokens.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    is_sampled: bool
    pad: int | None
    max_length: int


class Decoding:
    """A batch under way.

    Args:
        model, cache: as of `generate`.
        tally: of the cache's drafts.
        prompt: int64 [sequences, n]: all that the cache holds and more, or only what is new.
        inputs: what `generate` prepared for the model's forward pass.
        rules: how tokens are decided.
        gamma: tokens that are proposed at most; None: chosen.
        streamer: of transformers, or None.
        assistant: a smaller model that proposes; None: the cache's draft has none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        tally: Tally,
        prompt: torch.Tensor,
        inputs: dict[str, Any],
        rules: Rules,
        gamma: int | None,
        streamer: Any,
        assistant: Assistant | None = None,
    ):
        self._assistant, self._undecided = assistant, Undecided(cache.passes)
        self._model, self._cache, self._rules = model, cache, rules
        self._tally, self._gamma, self._streamer = tally, gamma, streamer
        n_sequences, n = prompt.shape
        self._processors = [processors_of(rules.processors, row) for row in range(n_sequences)]
        self._ids = torch.full((n_sequences, max(rules.max_length, n)), rules.pad or 0)
        self._ids[:, :n] = prompt.cpu()
        self._lengths = [n] * n_sequences
        self._going = list(range(n_sequences))  # the sequences that passes go over
        self._ended = set[int]()
        mask = inputs.get("attention_mask")
        self._seen = None if mask is None else mask.bool().cpu()
        # a mask of ones is left out, and positions are as many as it had
        self._is_whole = inputs["position_ids"].shape[1] == n
        self._next = inputs["position_ids"][:, -1].cpu().expand(n_sequences) + 1
        # those whose names `generate` does not prepare anew
        self._inputs = {
            name: value
            for name, value in inputs.items()
            if name not in ("attention_mask", "position_ids", "logits_to_keep")
        }
        self._limit = learned_positions(model)
        self._found = list[list[int]]()  # of each of these, what lookup proposes
        # where gamma is given, a text comes again by its seed: others' have no part in it
        self._sources = tally.sources if gamma is None else Sources()
        tally.reach.begin()
        self._before = 0  # tokens in the cache that are not in the prompt
        self._prompted = 0  # tokens in the cache after the prompt

    def ids(self) -> torch.Tensor:
        """int64 [sequences, n]: prompts and what follows, padded on the right."""
        found = self._ids[:, : max(self._lengths)].clone()
        for row, length in enumerate(self._lengths):
            found[row, length:] = self._rules.pad or 0  # drafts stood there
        return found

    def run(self, prefill: Callable[[], torch.Tensor], name: str, *, chunk: int | None) -> None:
        """Decodes to the end of every text.

        Args:
            prefill: computes what of the prompt is not in the cache yet: the logits [sequences,
                vocabulary] behind it.
            name: of the cache among the arguments of the model.
            chunk: new tokens that `prefill` computes at a time; None: all.

        Raises what `generate` raises.
        """
        self._inputs[name] = self._cache
        with ExitStack() as undo:
            logits = self._prefilled(prefill, chunk, undo)
            self._prompted = self._cache.get_seq_length()
            self._before = self._prompted - self._lengths[0]
            try:
                for row in self._going:
                    self._decide(row, logits[row : row + 1], Draft([]))
                self._drop_ended(undo)
                while self._going:
                    self._step()
                    self._drop_ended(undo)
            except errors.EspnxError as error:
                error.sequences = self.ids()  # type: ignore[attr-defined]
                raise

    def _prefilled(
        self, prefill: Callable[[], torch.Tensor], chunk: int | None, undo: ExitStack
    ) -> torch.Tensor:
        """What `prefill` returns. From then on tokens may be rejected, until `undo`.

        Where a few tokens follow a text that is in the cache, their pass over its rows is like any
        other: it brings rows for drafts, says what a pass takes, before the first draft, and puts
        the next one's reads in line.
        """
        cache, passes, tally = self._cache, self._cache.passes, self._tally
        held, n = cache.get_seq_length(), self._lengths[0]
        if self._is_whole:
            n -= held  # the prompt begins with what is in the cache
        is_pass = held > 0 and 0 < n < CHUNK_TOKENS and (chunk is None or n <= chunk)
        room = max(0, self._rules.max_length - self._lengths[0])
        most = CHUNK_TOKENS if self._gamma is None else 1 + min(self._gamma, room)

        def propose() -> None:
            cache.store.propose(tier_of(tally), most_tokens=most)
            undo.callback(self._undecided.settle)

        if is_pass:
            propose()
        begun, waited_s, asked = time.perf_counter(), self._waited_s(), self._read().bytes_asked
        with passes.prompting():
            logits = prefill()
        if is_pass:
            self._undecided.accept(n, [n] * len(self._going))
        else:
            propose()
        if is_pass and n == 1:
            pass_s = time.perf_counter() - begun
            is_slow = tally.kind == PACKED
            tally.pace.note_first(
                len(self._going), pass_s, self._waited_s() - waited_s, is_slow=is_slow
            )
            tally.reach.note(self._read().bytes_asked - asked, 0, pass_s)
        return logits

    def _waited_s(self) -> float:
        """Seconds that passes waited for reads so far."""
        store = self._cache.store
        threads = store.options.threads or torch.get_num_threads()
        return store.striped.stats().waiting_s / threads

    def _drop_ended(self, undo: ExitStack) -> None:
        """Sequences that have ended leave the batch of the passes; the cache gets them back at the
        end, with what all had when the first of them left."""
        left = [row for row in self._going if row not in self._ended]
        if self._assistant is not None:
            for row in self._ended:
                self._assistant.end(row)
        if left and len(left) < len(self._going):
            if len(self._going) == len(self._lengths):
                undo.enter_context(self._undecided.aside())
            self._cache.passes.select([self._going.index(row) for row in left])
        self._going = left

    def _step(self) -> None:
        """Drafts, and the pass that decides on them."""
        tally, undecided = self._tally, self._undecided
        before_drafts, begun = self._read(), time.perf_counter()
        drafts = self._drafts()
        before_pass, drafted = self._read(), time.perf_counter()
        # the pass that packs all rows is slower than any after it
        is_slow = tally.kind == PACKED and not undecided.rows.has_tier
        n = 1 + max(len(draft.tokens) for draft in drafts)
        own = [
            [int(self._ids[row, self._lengths[row] - 1]), *draft.tokens]
            for row, draft in zip(self._going, drafts, strict=True)
        ]
        logits = self._forward(own, n, self._cache.get_seq_length())
        before = [self._lengths[row] for row in self._going]
        try:
            for place, row in enumerate(self._going):
                self._decide(row, logits[place], drafts[place])
        except BaseException:
            for row, length in zip(self._going, before, strict=True):
                self._lengths[row] = length
            self._ended.difference_update(self._going)
            undecided.accept(n, [0] * len(before))
            raise
        kept = [
            self._lengths[row] - length for row, length in zip(self._going, before, strict=True)
        ]
        undecided.accept(n, kept)
        pass_s = time.perf_counter() - drafted
        said, sources = [len(draft.tokens) for draft in drafts], [each.source for each in drafts]
        looked = [
            would_bring(found, self._ids[row, begin : begin + n].tolist())
            for row, found, begin, n in zip(self._going, self._found, before, kept, strict=True)
        ]
        tally.add(said, kept, drafted - begun, pass_s, sources, looked, is_slow=is_slow)
        if self._sources is not tally.sources:
            self._sources.note(sources, said, kept, drafted - begun, pass_s, looked)
        tally.lost = max(tally.lost, len(undecided.rows.lost.sequences))
        tally.memory_bytes = max(tally.memory_bytes, undecided.rows.tier_bytes)
        tally.draft_bytes_asked += before_pass.bytes_asked - before_drafts.bytes_asked
        asked = self._read().bytes_asked - before_pass.bytes_asked
        tally.bytes_asked += asked
        tally.reach.read_bytes += max(0, before_pass.ahead_bytes - before_drafts.ahead_bytes)
        tally.reach.note(asked, before_pass.ahead_bytes, pass_s)

    def _read(self) -> DeviceStats:
        """What the devices read so far."""
        return self._cache.store.striped.stats()

    # --- drafts ---

    def _drafts(self) -> list[Draft]:
        """Tokens that may come next, for each sequence that goes on: what lookup finds or what a
        model says, whichever comes first, and where that is nothing the other."""
        pace, store, kind = self._tally.pace, self._cache.store, self._tally.kind
        rows = self._undecided.rows
        most = [self._room(row) for row in self._going]
        if self._gamma is None:
            pace.choose(len(self._going), max(most))
        else:
            pace.gamma, pace.why = self._gamma, "as asked"
        options, reach = store.options, self._tally.reach
        store.read_ahead(reach.choose(pace.draft_s, rows.tier_bytes, options.deadline_s))
        if lost := len(rows.lost.sequences):
            pace.why += f"; {lost} of {len(self._going)} sequences have no memory for drafts"
        room = [min(pace.gamma, n) for n in most]
        # also where it is not used: what it would have brought is known after the pass
        self._found = [
            continuation(self._ids[row, : self._lengths[row]].numpy(), n)
            for row, n in zip(self._going, room, strict=True)
        ]
        looked = [Draft(found) for found in self._found]
        if self._assistant is None and (kind == LOOKUP or not rows.has_tier):
            return looked  # the first pass brings what a model attends to
        # by the clock only where that chooses in any case: what is sampled comes again otherwise
        is_first = self._sources.asks_lookup(by_clock=self._gamma is None)
        drafts = looked if is_first else [Draft([]) for _ in room]
        left = [0 if draft.tokens else n for draft, n in zip(drafts, most, strict=True)]
        if self._assistant is not None:
            begun = time.perf_counter()
            said = [
                self._assisted(row, min(n, pace.gamma), self._assistant)
                for row, n in zip(self._going, left, strict=True)
            ]
            if longest := max(len(draft.tokens) for draft in said):
                pace.note_step((time.perf_counter() - begun) / longest)
        else:
            for place in rows.lost.sequences:
                left[place] = 0
            said = self._by_model(left)
        return [
            next((each for each in every if each.tokens), every[-1])
            for every in zip(drafts, said, looked, strict=True)
        ]

    def _assisted(self, row: int, n: int, assistant: Assistant) -> Draft:
        """What the smaller model says, of at most `n` tokens."""
        if not n:
            return Draft([])
        first = 0 if self._seen is None else int(self._seen[row].int().argmax())
        ids = self._ids[row, max(0, first - self._before) : self._lengths[row]]
        draft = assistant.draft(row, ids, n, is_sampled=self._rules.is_sampled)
        draft.source = self._tally.kind
        return draft

    def _room(self, row: int) -> int:
        """How many tokens may be proposed for a text at most."""
        length = self._lengths[row]
        room = [self._rules.max_length - length - 1]
        if self._limit is not None:
            room.append(self._limit - 1 - self._position(row))
        shortest = min(self._lengths[each] for each in self._going)
        return 0 if length - shortest >= _LEAD_TOKENS else max(0, min(room))

    def _by_model(self, room: list[int]) -> list[Draft]:
        """What the model says of a part of the rows, token by token, for all sequences at once."""
        rules, begin = self._rules, self._cache.get_seq_length()
        drafts = [Draft([], [] if rules.is_sampled else None, self._tally.kind) for _ in room]
        if not any(room):
            return drafts
        last = [[int(self._ids[row, self._lengths[row] - 1])] for row in self._going]
        with self._undecided.drafting():
            for done in range(max(room)):
                if not self._goes_on(done):
                    break
                begun = time.perf_counter()
                logits = self._forward(last, 1, begin, done)
                for place, (row, draft) in enumerate(zip(self._going, drafts, strict=True)):
                    if done >= room[place]:
                        continue
                    # behind the text, where what is decided will stand
                    end = self._lengths[row] + done
                    scores = self._scores(row, end, logits[place])
                    token, by = drawn(scores, is_sampled=rules.is_sampled)
                    self._ids[row, end] = token
                    draft.tokens.append(token)
                    if by is not None and draft.drawn_by is not None:
                        draft.drawn_by.append(by)
                    last[place] = [token]
                self._tally.pace.note_step(time.perf_counter() - begun)
        return drafts

    def _goes_on(self, done: int) -> bool:
        """Whether a model proposes one more token behind so many."""
        return self._tally.pace.goes_on(done) if self._gamma is None else done < self._gamma

    def _position(self, row: int) -> int:
        """The position, to the model, of a text's last token, which is not in the cache yet."""
        fed = self._before + self._lengths[row] - 1
        return int(self._next[row]) + fed - self._prompted

    # --- the pass ---

    def _forward(self, own: list[list[int]], n: int, begin: int, done: int = 0) -> torch.Tensor:
        """A forward pass: logits [sequences, n, vocabulary] behind each of n tokens, at the places
        `begin + done` and following of the cache.

        Args:
            own: tokens of each sequence; the last one stands in for those that it lacks.
            begin: tokens of the longest sequence.
            done: tokens from there on that are in the cache for each sequence.
        """
        tokens, positions = list[list[int]](), list[list[int]]()
        for row, mine in zip(self._going, own, strict=True):
            tokens.append(mine + mine[-1:] * (n - len(mine)))
            first = self._position(row) + done
            if self._limit is not None:  # a draft that is not wanted any more goes on all the same
                first = min(first, self._limit - 1)
            positions.append([first + min(i, len(mine) - 1) for i in range(n)])
        device = self._model.device
        inputs = self._model.prepare_inputs_for_generation(
            torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            attention_mask=self._mask(begin, done + n),
            **self._inputs,
        )
        return self._model(**inputs, return_dict=True).logits.to("cpu", torch.float32)

    def _mask(self, begin: int, new: int) -> torch.Tensor | None:
        """[sequences, positions]: what is padding, and what lies between the end of a sequence and
        the new tokens, which begin at `begin`, is hidden; None: nothing is."""
        ends = torch.tensor([self._before + self._lengths[row] - 1 for row in self._going])
        if self._seen is None and bool((ends == begin).all()):
            return None
        seen = torch.ones(len(ends), begin + new, dtype=torch.int64)
        if self._seen is not None:
            seen[:, : self._seen.shape[1]] = self._seen[self._going]
        position = torch.arange(begin + new)
        seen[(position >= ends[:, None]) & (position < begin)] = 0
        return seen.to(self._model.device)

    # --- what it decides ---

    def _scores(self, row: int, length: int, logits: torch.Tensor) -> torch.Tensor:
        """float32 [vocabulary]: logits [1, vocabulary] behind the first `length` tokens of a text,
        as the processors leave them."""
        own = logits.to("cpu", torch.float32, copy=True)
        return self._processors[row](self._ids[row : row + 1, :length], own)[0]

    def _decide(self, row: int, logits: torch.Tensor, draft: Draft) -> None:
        """The tokens of a text that follow from logits [n, vocabulary]: those of the draft as long
        as they are the pass's own, and one more. Raises StateError where one that decides is
        NaN."""
        rules = self._rules
        for place in range(len(draft.tokens) + 1):
            length = self._lengths[row]
            if bool(logits[place].isnan().any()):
                raise errors.StateError(
                    f"logits of sequence {row}",
                    got="NaN",
                    expected="numbers",
                    fix="compute in a wider dtype, or check the model's weights",
                )
            scores = self._scores(row, length, logits[place : place + 1])
            token, is_drafted = next_token(scores, *draft.at(place), is_sampled=rules.is_sampled)
            self._ids[row, length] = token
            self._lengths[row] = length + 1
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if bool(rules.criteria(self._ids[row : row + 1, : length + 1], None).all()):
                self._ended.add(row)
            if not is_drafted or row in self._ended:
                break
