"""`generate`: a model's own `generate` with the loop of `decoding`, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .... import errors
from ....checks import check_whole
from ....kv.draft.rows import tier_of
from ....kv.draft.tally import Tally
from ..cache import KVCache
from ..cache_argument import CACHE_NAMES, cache_in, cache_name
from .assistant import Assistant
from .decoding import Decoding, Rules
from .probe import check_pass
from .vocabulary import check_tokens

_WHAT = "generation with a draft"
#: What `generate` prepares for a model's forward pass and is made anew here for each pass.
_OWN = {*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
#: Outputs of `generate` that are tensors of every step.
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
#: Processors that run the model, or remember what they were called with.
_STEPWISE = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
#: Processors that take the rows that they are given for the batch: theirs are one at a time here.
_BATCHWISE = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
)
#: Rotations that change with the length of the text.
_GROWING = ("dynamic", "longrope")


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    gamma: int | None = None,
    streamer: Any = None,
    inputs_tensor: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """What ``model.generate`` returns, with a `KVCache` that has a draft: several tokens are
    proposed, and one pass over the rows on SSD decides on all of them (speculative decoding,
    Leviathan et al., arXiv 2211.17192). Greedy tokens are those of decoding one by one, sampled
    ones have the same distribution.

    Call it like the model's own `generate`, or give it to that: ``model.generate(...,
    past_key_values=cache, custom_generate=espnx.generate)``.

    Args:
        model: of transformers, after `enable_kv_cache`.
        inputs: int64 [sequences, n], the prompt; or ``input_ids=``.
        gamma: tokens that are proposed for each sequence of a pass, at most; None: chosen.
        streamer: is put the tokens of a single sequence, as they are decided.
        inputs_tensor: as transformers gives it to a function that decodes.
        **options: of the model's `generate`. Processors of logits and criteria for stopping are
            called for each token, one sequence at a time.

    Raises:
        InvalidInputError: the cache has no draft; beams, or something else that is not one text
            after another; a token that a model has no row for; a model that cannot forget tokens
            of some sequences (windows and states that stay in memory), whose rotations change with
            the length of the text, or whose logits change with the number of tokens in a pass.
        StateError: the model's logits are NaN; the cache is as before that pass.
        ReadError, ...: as of a pass without drafts, with `sequences`: the texts so far, padded on
            the right; the cache is as before it.
    """
    if inputs_tensor is None:
        given = {} if gamma is None else {"gamma": gamma}
        return model.generate(
            inputs, custom_generate=generate, streamer=streamer, **given, **options
        )
    if inputs is None:
        raise errors.InvalidInputError(_WHAT, got="no prompt", expected="input_ids")
    cache, tally = _checked_cache(model, options)
    config, rest = options.pop("generation_config"), dict(options)
    pad = config._pad_token_tensor
    rules = Rules(
        rest.pop("logits_processor"),
        rest.pop("stopping_criteria"),
        is_sampled=config.do_sample,
        pad=None if pad is None else int(pad.flatten()[0]),
        max_length=config.max_length,
    )
    if tier_of(tally) is not None and any(each.is_meta for each in model.parameters()):
        raise errors.InvalidInputError(
            f"draft={tally.kind!r} of a model whose weights are streamed",
            got="weights that every draft would read again",
            fix="draft='lookup', or an assistant in memory",
        )
    _check(model, inputs, config, rules, rest)
    if gamma is not None:
        check_whole("gamma", gamma, 0)
    if streamer is not None and len(inputs) > 1:
        raise errors.InvalidInputError(
            "a streamer of several sequences", got=len(inputs), expected=1, fix="streamer=None"
        )
    check_tokens(model, inputs, cache.assistant, drafts=tier_of(tally) is not None)
    check_pass(model, inputs)
    with ExitStack() as at_end:
        if streamer is not None:
            at_end.callback(streamer.end)
        assistant = (
            None
            if cache.assistant is None
            else Assistant(cache.assistant, config, rules.processors)
        )
        decoding = Decoding(
            model, cache, tally, inputs, rest, rules, gamma, streamer, assistant=assistant
        )
        decoding.run(
            lambda: model._prefill(inputs, config, dict(rest)).logits[:, -1],
            cache_name(rest) or CACHE_NAMES[0],
            chunk=config.prefill_chunk_size,
        )
    ids = decoding.ids().to(inputs.device)
    if not config.return_dict_in_generate:
        return ids
    return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache)


def _checked_cache(model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[KVCache, Tally]:
    cache = cache_in(options)
    if not isinstance(cache, KVCache):
        raise errors.InvalidInputError(
            _WHAT,
            got="no cache" if cache is None else type(cache).__name__,
            expected="a KVCache",
            fix='past_key_values=espnx.KVCache(model.config, DIR, draft="lookup")',
        )
    if cache.draft is None:
        raise errors.InvalidInputError(
            _WHAT,
            got="a cache without one",
            fix='KVCache(..., draft="lookup"), or generate without custom_generate',
        )
    kinds = sorted({type(layer).__name__ for layer in cache.passes.in_memory.every})
    if kinds:
        raise errors.InvalidInputError(
            f"{_WHAT} of {type(model).__name__}",
            got=f"layers that stay in memory ({', '.join(kinds)})",
            expected="full attention in every layer",
            fix="generate without custom_generate",
        )
    return cache, cache.draft


def _check(
    model: PreTrainedModel, ids: torch.Tensor, config: Any, rules: Rules, rest: Mapping[str, Any]
) -> None:
    mode, n_sequences = config.get_generation_mode(), len(ids)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise errors.InvalidInputError(
            _WHAT,
            got=mode.value.replace("_", " "),
            expected="greedy search, or sampling",
            fix="generate without custom_generate",
        )
    if named := [name for name in _OUTPUTS if getattr(config, name, None)]:
        raise errors.InvalidInputError(
            _WHAT, got=", ".join(named), fix="generate without custom_generate"
        )
    refused = _STEPWISE + (_BATCHWISE if n_sequences > 1 else ())
    if found := [type(each).__name__ for each in rules.processors if isinstance(each, refused)]:
        raise errors.InvalidInputError(
            _WHAT,
            got=", ".join(found),
            expected="processors of the logits of one text at a time",
            fix="generate without custom_generate",
        )
    if rules.pad is None and n_sequences > 1:
        raise errors.InvalidInputError(
            f"{_WHAT} of several sequences", got="no pad_token_id", fix="pad_token_id=..."
        )
    tensors = sorted(
        name for name, value in rest.items() if name not in _OWN and torch.is_tensor(value)
    )
    positions = rest.get("position_ids")
    if tensors or positions is None or positions.dim() != 2:
        got = ", ".join(tensors) or (
            "a model that takes no position_ids"
            if positions is None
            else f"position_ids {list(positions.shape)}"
        )
        raise errors.InvalidInputError(
            _WHAT,
            got=got,
            expected="text alone: input_ids, attention_mask and position_ids [sequences, n]",
        )
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {
        str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, Mapping)
    }
    if growing := kinds & {*_GROWING}:
        raise errors.InvalidInputError(
            f"{_WHAT} of {type(model).__name__}",
            got=f"rotations that change with the length of the text ({', '.join(growing)})",
            expected="a model whose tokens do not depend on how many are computed at once",
            fix="generate without custom_generate",
        )
