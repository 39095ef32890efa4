"""`generate` with each argument that it documents: what the framework returns, with a `KVCache` and
without, or a refusal by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import (
    CompileConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    TextStreamer,
    WatermarkingConfig,
)

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.forward.attention import espnx_attention
from tests.integrations.transformers.tiny import VOCABULARY, enabled, make, plain, prompt

_SAMPLE: dict[str, Any] = {"do_sample": True}
_BEAMS: dict[str, Any] = {"num_beams": 2}


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each printable character."""
    words = ["[PAD]", "[UNK]", *map(chr, range(32, 127))]
    assert len(words) == VOCABULARY
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="[UNK]")
    )
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", bos_token="[UNK]"
    )


def _assistant() -> dict[str, Any]:
    return {"assistant_model": make("llama", seed=5)}


def _with(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


def _sampled(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: _SAMPLE | options


#: For each argument a call that uses it.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    # of `generate`
    "inputs": dict,
    "generation_config": _with(
        generation_config=GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    ),
    "logits_processor": lambda: {
        "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(30, 5)])
    },
    "stopping_criteria": lambda: {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(24)])
    },
    "prefix_allowed_tokens_fn": _with(prefix_allowed_tokens_fn=lambda _, ids: [5, 6, int(ids[-1])]),
    "synced_gpus": _with(synced_gpus=False),
    "assistant_model": _assistant,
    "streamer": lambda: {"streamer": TextStreamer(_tokenizer())},
    "negative_prompt_ids": lambda: {
        "guidance_scale": 1.5,
        "negative_prompt_ids": prompt([7], 3)["input_ids"],
    },
    "negative_prompt_attention_mask": lambda: {
        "guidance_scale": 1.5,
        "negative_prompt_ids": prompt([7], 3)["input_ids"],
        "negative_prompt_attention_mask": torch.ones(1, 7),
    },
    "custom_generate": _with(custom_generate=transformers.GenerationMixin._sample),
    "tokenizer": lambda: {"tokenizer": _tokenizer()},
    "assistant_tokenizer": lambda: {
        "assistant_model": make("llama", seed=5, vocab_size=98),
        "tokenizer": _tokenizer(),
        "assistant_tokenizer": _tokenizer(),
    },
    # of `GenerationConfig`
    "max_length": _with(max_length=29, max_new_tokens=None),
    "max_new_tokens": _with(max_new_tokens=3),
    "min_length": _with(min_length=25, eos_token_id=44),
    "min_new_tokens": _with(min_new_tokens=5, eos_token_id=44),
    "early_stopping": lambda: _BEAMS | {"early_stopping": True},
    "max_time": _with(max_time=1e4),
    "stop_strings": lambda: {"stop_strings": ["a", "b", "c", "#"], "tokenizer": _tokenizer()},
    "do_sample": _with(do_sample=True),
    "num_beams": _with(num_beams=3),
    "use_mtp": _with(use_mtp=True),
    "use_cache": _with(use_cache=False),
    "cache_implementation": _with(cache_implementation="dynamic"),
    "cache_config": _with(cache_implementation="quantized", cache_config={"backend": "quanto"}),
    "max_cache_len": _with(cache_implementation="static", max_cache_len=64),
    "temperature": _sampled(temperature=0.5),
    "top_k": _sampled(top_k=5),
    "top_p": _sampled(top_p=0.5),
    "min_p": _sampled(min_p=0.1),
    "top_h": _sampled(top_h=0.5),
    "typical_p": _sampled(typical_p=0.5),
    "epsilon_cutoff": _sampled(epsilon_cutoff=0.01),
    "eta_cutoff": _sampled(eta_cutoff=0.01),
    "repetition_penalty": _with(repetition_penalty=1.3),
    "encoder_repetition_penalty": _with(encoder_repetition_penalty=1.3),
    "length_penalty": lambda: _BEAMS | {"length_penalty": 2.0},
    "no_repeat_ngram_size": _with(no_repeat_ngram_size=2),
    "bad_words_ids": _with(bad_words_ids=[[5, 6], [44]]),
    "renormalize_logits": _sampled(renormalize_logits=True),
    "forced_bos_token_id": _with(forced_bos_token_id=7),
    "forced_eos_token_id": _with(forced_eos_token_id=7),
    "remove_invalid_values": _with(remove_invalid_values=True),
    "exponential_decay_length_penalty": _with(
        exponential_decay_length_penalty=(3, 1.5), eos_token_id=44
    ),
    "suppress_tokens": _with(suppress_tokens=[44, 45]),
    "begin_suppress_tokens": _with(begin_suppress_tokens=[44, 45]),
    "sequence_bias": _with(sequence_bias=[[[44], -5.0]]),
    "token_healing": lambda: {"token_healing": True, "tokenizer": _tokenizer()},
    "guidance_scale": _with(guidance_scale=1.5),
    "watermarking_config": lambda: {"watermarking_config": WatermarkingConfig()},
    "num_return_sequences": _sampled(num_return_sequences=3),
    "output_attentions": _with(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": _with(output_hidden_states=True, return_dict_in_generate=True),
    "output_scores": _with(output_scores=True, return_dict_in_generate=True),
    "output_logits": _with(output_logits=True, return_dict_in_generate=True),
    "return_dict_in_generate": _with(return_dict_in_generate=True),
    "pad_token_id": _with(pad_token_id=2),
    "bos_token_id": _with(bos_token_id=2),
    "eos_token_id": _with(eos_token_id=[44, 45]),
    "encoder_no_repeat_ngram_size": _with(encoder_no_repeat_ngram_size=2),
    "decoder_start_token_id": _with(decoder_start_token_id=2),
    "is_assistant": _with(is_assistant=True),
    "num_assistant_tokens": lambda: _assistant() | {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": lambda: (
        _assistant() | {"num_assistant_tokens_schedule": "heuristic"}
    ),
    "assistant_confidence_threshold": lambda: (
        _assistant() | {"assistant_confidence_threshold": 0.1}
    ),
    "prompt_lookup_num_tokens": _with(prompt_lookup_num_tokens=3),
    "max_matching_ngram_size": _with(prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
    "assistant_early_exit": _with(assistant_early_exit=1),
    "assistant_lookbehind": lambda: _assistant() | {"assistant_lookbehind": 5},
    "target_lookbehind": lambda: _assistant() | {"target_lookbehind": 5},
    "assistant_ensemble_weight": lambda: _assistant() | {"assistant_ensemble_weight": 0.5},
    "speculation_type": _with(speculation_type="mtp"),
    "compile_config": lambda: {"compile_config": CompileConfig()},
    "disable_compile": _with(disable_compile=True),
    "continuous_batching_config": _with(cache_implementation="paged"),
    "low_memory": _with(low_memory=True),
    "penalty_alpha": _with(penalty_alpha=0.6, top_k=4),
    "dola_layers": _with(dola_layers="high"),
    "diversity_penalty": lambda: _BEAMS | {"num_beam_groups": 2, "diversity_penalty": 1.0},
    "num_beam_groups": lambda: _BEAMS | {"num_beam_groups": 2, "diversity_penalty": 1.0},
    "constraints": lambda: _BEAMS | {"constraints": []},
    "force_words_ids": lambda: _BEAMS | {"force_words_ids": [[5]]},
    "prefill_chunk_size": _with(prefill_chunk_size=7),
}

#: What an enabled model refuses that another generates with: with a `KVCache`, and (True) without
#: one.
REFUSED = {
    ("use_cache", False): "use_cache=False",
    ("cache_implementation", False): "Passing both",
    ("cache_config", False): "Passing both",
    ("max_cache_len", False): "Passing both",
    ("max_cache_len", True): "a cache of a fixed size",
    ("continuous_batching_config", False): "continuous batching",
    ("continuous_batching_config", True): "continuous batching",
}

# of what is deprecated, or of no use without another argument
pytestmark = pytest.mark.filterwarnings("ignore")


def test_no_argument_is_left_out() -> None:
    """A version of the framework that brings another is noticed here."""
    of_generate = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {
        "self",
        "kwargs",
    }
    of_config = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {
        "transformers_version"
    }
    assert of_generate | of_config <= set(CALLS), sorted((of_generate | of_config) - set(CALLS))


def tried(model: PreTrainedModel, options: dict[str, Any], cache: Any) -> torch.Tensor | Exception:
    """Token ids, or what was raised."""
    torch.manual_seed(0)
    call = {"max_new_tokens": 9} | options
    if "generation_config" in options:
        call = options
    elif not any(call.get(name) for name in ("do_sample", "custom_generate")):
        call["do_sample"] = False
    try:
        got = model.generate(
            prompt([20])["input_ids"],
            attention_mask=torch.ones(1, 20, dtype=torch.long),
            past_key_values=cache,
            **call,
        )
    except Exception as error:
        return error
    return got if isinstance(got, torch.Tensor) else got.sequences


def cases() -> Iterator[Any]:
    """Every argument with a cache of ours; without one those that are refused then, and every
    fourth, in `make sweep` all."""
    for number, name in enumerate(CALLS):
        yield pytest.param(name, False, id=f"{name}-KVCache")
        marks = () if number % 4 == 0 or (name, True) in REFUSED else (pytest.mark.sweep,)
        yield pytest.param(name, True, id=f"{name}-no cache", marks=marks)


@pytest.mark.parametrize(("name", "without"), list(cases()))
def test_the_frameworks_tokens_or_a_refusal(folder: Path, name: str, without: bool) -> None:
    with KVCache(enabled("llama").config, folder, x_rows=0) as cache:
        found = tried(enabled("llama"), CALLS[name](), None if without else cache)
        if (name, without) in REFUSED:
            assert isinstance(found, (errors.InvalidInputError, ValueError)), found
            assert REFUSED[name, without] in str(found)
            return
        wanted = tried(
            plain("llama"),
            CALLS[name](),
            None if without else DynamicCache(config=plain("llama").config),
        )
        if isinstance(wanted, Exception):  # the framework refuses it itself, whatever the model
            assert type(found) is type(wanted), found
            assert not isinstance(found, errors.EspnxError)
        else:
            assert isinstance(found, torch.Tensor), found
            assert torch.equal(found, wanted)
            assert without or cache.get_seq_length() >= found.shape[1] - 2


@pytest.mark.parametrize(
    "value", [3, 0.5, True, "left", torch.ones(2), [torch.ones(2)], {"a": 1.0}, lambda score: score]
)
def test_arguments_that_may_change_attention(value: Any) -> None:
    rows = torch.ones(1, 2, 4, 8)
    with pytest.raises(errors.InvalidInputError, match="got novelty; expected plain"):
        espnx_attention(torch.nn.Module(), rows, rows, rows, None, novelty=value)


@pytest.mark.parametrize("value", [None, _tokenizer(), object(), [], {"a": None}])
def test_arguments_that_cannot_change_attention(value: Any) -> None:
    rows = torch.ones(1, 2, 4, 8)
    assert torch.isfinite(
        espnx_attention(torch.nn.Module(), rows, rows, rows, None, novelty=value)[0]
    ).all()
