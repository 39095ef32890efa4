"""What `generate` does with a `KVCache` before the model is called: a prompt that is not the
cache's, a model that drops its cache.

A pass sees the tokens and the cache that it is given. Whether they are the text and the cache that
`generate` was given can be seen in `generate` alone, and in `prepare_inputs_for_generation`, which
a model may replace: so these two of an enabled model are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import errors
from .cache import KVCache
from .cache_argument import CACHE_NAMES, cache_in, cache_name
from .forward.attention import NAME


def watch_generation(model: PreTrainedModel) -> None:
    """Looks from here on at what the model generates with a `KVCache`. Models that do not generate
    have nothing to watch."""
    watched = {
        "generate": _generate,
        "prepare_inputs_for_generation": _prepare,
        "init_continuous_batching": _refuse_continuous_batching,
    }
    for name, function in watched.items():
        own = getattr(model, name, None)
        if own is not None:  # no closure: a partial is copied and pickled with its model
            setattr(
                model,
                name,
                update_wrapper(partial(function, own), own, ("__name__", "__doc__"), ()),
            )


def _generate(own: Any, *args: Any, **kwargs: Any) -> Any:
    """What the model's own `generate` returns. Raises InvalidInputError where the prompt does not
    go on from what the cache holds; ForeignFileError and others where that is no wonder."""
    cache, mask = cache_in(kwargs), kwargs.get("attention_mask")
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    # With a mask that is longer the tokens are new, all of them.
    if (
        isinstance(cache, KVCache)
        and isinstance(ids, torch.Tensor)
        and (mask is None or mask.shape[-1] == ids.shape[-1])
    ):
        _check_text(cache, own.__self__, ids)
    function, streamer = kwargs.get("custom_generate"), kwargs.get("streamer")
    if callable(function) and streamer is not None and "streamer" in signature(function).parameters:
        # transformers puts the prompt, and does not hand the streamer on
        kwargs["custom_generate"] = partial(function, streamer=streamer)
    return own(*args, **kwargs)


def _check_text(cache: KVCache, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Whether a text [sequences, n], which a model is to continue, begins with what is cached,
    and is longer.

    Raises InvalidInputError; where the model is another one, what `PassState.check_model` raises.
    """
    held, n = cache.get_seq_length(), input_ids.shape[-1]
    if (
        not held
        or cache.is_closed
        or (n > held and cache.passes.text.begins(input_ids, held) is not False)
    ):
        return
    cache.passes.check_model(model, None)
    raise errors.InvalidInputError(
        "a prompt and a cache that is in use",
        got="another text than the cache holds" if n > held else f"{n} tokens",
        expected=f"the whole text: the {held} tokens that the cache holds, and more",
        fix="cache.reuse_prefix(input_ids) before generate, or cache.reset()",
    )


def _prepare(
    own: Callable[..., dict[str, Any]], input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What the model's own `prepare_inputs_for_generation` returns, with the cache that it was
    given.

    Raises:
        InvalidInputError: `use_cache=False`.
        StateError: the model drops the cache, and the text that it is to be made of anew is not
            known.
    """
    cache = cache_in(kwargs)
    if not isinstance(cache, KVCache):
        return own(input_ids, *args, **kwargs)
    if kwargs.get("use_cache") is False:
        raise errors.InvalidInputError(
            "generate(use_cache=False) with a KVCache",
            expected="one of the two",
            fix="leave out use_cache, or past_key_values",
        )
    if (
        kwargs.get("is_first_iteration")
        and kwargs.get("next_sequence_length") is None
        and _is_whole(input_ids, kwargs)
    ):
        # Assisted decoding begins with the whole text, also where the cache holds the first part of
        # it.
        kwargs["next_sequence_length"] = input_ids.shape[-1] - cache.get_seq_length()
    inputs = own(input_ids, *args, **kwargs)
    if cache_in(inputs) is not cache:
        _begin_anew(cache, inputs)
        inputs[cache_name(kwargs) or CACHE_NAMES[0]] = cache
    return inputs


def _is_whole(input_ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether these tokens are the text from its beginning on, by their mask, or where there is
    none by their positions."""
    mask, positions, n = (
        kwargs.get("attention_mask"),
        kwargs.get("position_ids"),
        input_ids.shape[-1],
    )
    if mask is not None:
        return bool(mask.shape[-1] == n)
    return positions is not None and positions.shape[-1] == n and int(positions.max()) + 1 == n


def _begin_anew(cache: KVCache, inputs: dict[str, Any]) -> None:
    """A model has dropped its cache, as those do whose rotations change with the text's length
    (Phi-3 with longrope): K of the whole text is to be made anew. It goes into the same cache,
    which is emptied. Raises StateError."""
    ids, held = inputs.get("input_ids"), cache.get_seq_length()
    if held and not (
        ids is not None and ids.shape[-1] > held and cache.passes.text.begins(ids, held)
    ):
        error = errors.StateError(
            "a model that drops its cache",
            got=(
                f"a pass over {0 if ids is None else ids.shape[-1]} tokens without the {held} in "
                "the cache"
            ),
            expected="the whole text again",
            fix="cache.reset(), and call generate with the whole text so far (error.sequences)",
        )
        error.sequences = cache.tokens  # type: ignore[attr-defined]
        raise error
    cache.reset()


def _refuse_continuous_batching(own: Any, *args: Any, **kwargs: Any) -> Any:
    """Continuous batching has paged caches of its own, which it attends over itself. Raises
    InvalidInputError."""
    attention = own.__self__.config.get_text_config(decoder=True)._attn_implementation
    if attention == NAME:
        raise errors.InvalidInputError(
            "continuous batching (generate_batch) of an enabled model",
            got=f"attention {attention!r}",
            expected="'sdpa', or flash attention",
            fix='model.set_attn_implementation("sdpa"), and enable_kv_cache again afterwards',
        )
    return own(*args, **kwargs)
