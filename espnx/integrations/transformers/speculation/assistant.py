"""Drafts of a smaller model with the same vocabulary, by transformers' own protocol (`candidate
generators`, as its assisted generation has them): one for each text, each with a cache of its own
in memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from .... import errors
from ..forward.positions import learned_positions
from .draft import Draft
from .processors import processors_of


class Assistant:
    """A smaller model that proposes tokens for the texts of a batch.

    Args:
        model: the smaller one.
        config: of the generation, as transformers prepared it.
        processors: of the logits of both.
    """

    def __init__(self, model: Any, config: Any, processors: LogitsProcessorList):
        self._model, self._config, self._processors = model, config, processors
        self._limit = learned_positions(model)
        # by text: what proposes, and the tokens that it was fed
        self._of = dict[int, tuple[AssistedCandidateGenerator, torch.Tensor]]()

    def draft(self, text: int, ids: torch.Tensor, n: int, *, is_sampled: bool) -> Draft:
        """What may follow ids int64 [length] of the text of that number, without padding: `n`
        tokens at most, none where the model's positions have come to their end.

        Raises StateError: the model cannot say.
        """
        if self._limit is not None:
            n = min(n, self._limit + 1 - len(ids))  # the last one is not fed
        if n < 1:
            return Draft([])
        generator, fed = self._of.get(text) or (self._begun(text, ids), ids[:0])
        self._forget(generator, fed, ids)
        generator.num_assistant_tokens = n
        try:
            found, scores = generator.get_candidates(ids[None])
        except RuntimeError as error:  # as PyTorch says of NaN that are to be drawn from
            raise errors.StateError(
                f"a draft of {type(self._model).__name__}",
                got=str(error),
                expected="tokens",
                fix='another smaller model, or draft="lookup"',
            ) from error
        self._of[text] = generator, found[0].cpu()
        tokens = found[0, len(ids) :].tolist()
        if not tokens or scores is None:
            return Draft([])
        by = list(scores[0].to("cpu", torch.float32).softmax(dim=-1)) if is_sampled else None
        return Draft(tokens, by)

    def _begun(self, text: int, ids: torch.Tensor) -> AssistedCandidateGenerator:
        processors = processors_of(self._processors, text, is_padded=False)
        # without a mask tokens that stand for padding elsewhere would be hidden
        generator = AssistedCandidateGenerator(
            ids[None],
            self._model,
            self._config,
            {"attention_mask": torch.ones_like(ids[None])},
            logits_processor=processors,
        )
        # how many tokens are proposed is chosen here, not by their own rule, which remembers every
        # token that it was asked for
        for config in (generator.assistant_generation_config, generator.generation_config):
            config.assistant_confidence_threshold = 0.0
        return generator

    @staticmethod
    def _forget(
        generator: AssistedCandidateGenerator, fed: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Takes out of the smaller model's cache what the text did not become, and leaves its last
        token to be fed."""
        cache = generator.assistant_kwargs.get("past_key_values")
        if cache is None:
            return
        n = min(len(fed), len(ids) - 1)
        unlike = (fed[:n] != ids[:n]).nonzero()
        common = int(unlike[0]) if len(unlike) else n
        if (held := cache.get_seq_length()) > common:
            if common:
                cache.crop(common - held)
            else:
                del generator.assistant_kwargs["past_key_values"]

    def end(self, text: int) -> None:
        """A text has ended; its cache is let go of."""
        self._of.pop(text, None)
