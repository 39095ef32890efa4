r"""lm-evaluation-harness (0.4.13): the model ``espnx``, a Hugging Face decoder whose KV cache lies
on SSD.

The harness finds no models outside its own package, so this module has its command line::

    python -m espnx.integrations.lm_eval --model espnx --model_args pretrained=DIR,storage=DIR \
        --tasks TASK --include_path DIR

What a task generates goes through a `KVCache`. Likelihoods (multiple choice, perplexity) do not
need one: the harness computes them in one forward pass over context and continuation. With
``verify=True`` they are computed as tokens are generated: the context is read into the cache, then
the continuation is fed token by token, each attending over what is on disk.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from .. import errors
from ..device.registry import open_together
from ..kv.striping import directories_of
from .generate.generate import batches
from .transformers.cache import KVCache
from .transformers.enable import enable_kv_cache

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise errors.MissingDependencyError(
        "lm-evaluation-harness cannot be imported",
        got=str(error),
        fix='pip install "lm-eval[hf]==0.4.13"',
    ) from error

#: Of `KVCache`; as model arguments they are called the same.
_CACHE_OPTIONS = (
    "format",
    "spill_interval",
    "read_ahead_bytes",
    "capacity_tokens",
    "engine",
    "threads",
    "deadline_s",
)

Request = tuple[Any, list[int], list[int]]


@register_model("espnx")
class EspnxLM(HFLM):
    """A Hugging Face decoder whose KV cache lies on SSD.

    Args:
        pretrained: a folder, a name on the hub, or a model that was loaded already.
        storage: a directory on the SSD; several, one for each SSD: a sequence, or separated by
            colons.
        verify: likelihoods go through the cache too.
        verify_chunk: tokens of a continuation that are fed at a time.
        prefill_chunk: tokens of a context that are read at a time, to bound memory; None: all.
        storage_device: what keeps the rows and attends over them, ``device`` of `KVCache`:
            ``smartssd`` is HILOS's accelerator, emulated. (Of ``HFLM``, ``device`` is the model's.)
        stretch: of an emulated device: how many seconds one of its own takes. 0: it is not waited
            for, which scores do not depend on.
        x_rows: of `KVCache`. 0 by default, so that results do not depend on a measurement;
            ``"auto"`` measures.
        **options: of `KVCache` (format, spill_interval, read_ahead_bytes, capacity_tokens, engine,
            threads, deadline_s); all others are those of ``HFLM``.

    Attributes:
        cache_stats: `KVCache.stats` of each batch so far.

    Raises:
        InvalidInputError: an option is out of range, or the model's attention is none that espnx
            computes.

    An evaluation raises what a `KVCache` does.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        storage: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        verify: bool = False,
        verify_chunk: int = 1,
        prefill_chunk: int | None = None,
        storage_device: str | None = None,
        stretch: float | None = None,
        x_rows: int | str = 0,
        **options: Any,
    ):
        if not storage:
            raise errors.InvalidInputError(
                "model arguments",
                got="no storage",
                expected="a directory",
                fix="--model_args storage=DIR,...",
            )
        for name, value in (("verify_chunk", verify_chunk), ("prefill_chunk", prefill_chunk)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise errors.InvalidInputError(name, got=value, expected="at least 1")
        if x_rows != "auto" and (not isinstance(x_rows, int) or x_rows < 0):
            raise errors.InvalidInputError(
                "x_rows", got=x_rows, expected='0, a number of sequences, or "auto"'
            )
        self.storage = storage.split(os.pathsep) if isinstance(storage, str) else storage
        self.verify, self._verify_chunk, self._prefill_chunk = verify, verify_chunk, prefill_chunk
        self._cache_options = {
            name: options.pop(name) for name in _CACHE_OPTIONS if name in options
        }
        self._storage_device, self._device_options = (
            storage_device,
            {} if stretch is None else {"stretch": stretch},
        )
        self._cache_options["x_rows"] = None if x_rows == "auto" else x_rows
        self.cache_stats: list[dict[str, Any]] = []
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, **options)
        enable_kv_cache(self.model)

    @contextmanager
    def _cache(self) -> Iterator[KVCache]:
        """Opens a cache for one batch."""
        with ExitStack() as opened:
            devices = None
            if self._storage_device is not None:
                devices = open_together(
                    self._storage_device, directories_of(self.storage), **self._device_options
                )
                for each in devices:
                    opened.callback(each.close)
            yield opened.enter_context(
                KVCache(self.model.config, self.storage, device=devices, **self._cache_options)
            )

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        if self._prefill_chunk is not None:
            generation_kwargs.setdefault("prefill_chunk_size", self._prefill_chunk)
        with self._cache() as cache:
            found = super()._model_generate(
                context, max_length, stop, past_key_values=cache, **generation_kwargs
            )
            self.cache_stats.append(cache.stats())
        return found

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log probability, whether it is what greedy decoding says) of each continuation."""
        if not self.verify:
            return super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
        size = override_bs or self.batch_size
        if not isinstance(size, int):
            raise errors.InvalidInputError(
                "verify with this batch size",
                got=repr(size),
                expected="a number",
                fix="--batch_size N",
            )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        split = [self._split(context, continuation) for _, context, continuation in requests]
        # Together go contexts of like length, as far as the caller's batches allow it.
        for batch in batches([len(context) for context, _ in split], size):
            for i, answer in zip(batch, self._score([split[i] for i in batch]), strict=True):
                answers[i] = answer
                if requests[i][0] is not None:  # windows of one text have no key
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return answers

    def _split(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """What is read, and what is then fed and scored; as ``HFLM`` does, the left is cut off
        where both are too long."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise errors.InvalidInputError(
                "a request",
                got=f"{len(context)} and {len(continuation)} tokens",
                expected=f"a context, and 1 to {self.max_length} tokens",
            )
        return (context + continuation)[-(self.max_length + 1) :][
            : -len(continuation)
        ], continuation

    def _score(self, batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = len(batch)
        length = max(len(context) for context, _ in batch)
        steps = max(len(continuation) for _, continuation in batch)
        # Contexts end in one column, padded on the left as for generation; continuations begin in
        # the next.
        ids = torch.zeros(rows, length + steps, dtype=torch.long)
        mask, counts = torch.zeros_like(ids), torch.zeros(rows, steps, dtype=torch.bool)
        for row, (context, continuation) in enumerate(batch):
            begin, end = length - len(context), length + len(continuation)
            ids[row, begin:end] = torch.tensor(context + continuation)
            mask[row, begin:] = 1
            counts[row, : len(continuation)] = True
        totals, greedy = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.bool)
        with self._cache() as cache:
            # The last token is scored, and need not be fed.
            for begin, end, logits in self._feed(cache, ids[:, :-1], mask[:, :-1], length):
                first, last = begin - length + 1, end - length + 1
                said = ids[:, begin + 1 : end + 1]
                each = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype).cpu()
                scores = each.gather(2, said.unsqueeze(-1)).squeeze(-1)
                counted = counts[:, first:last]
                totals += torch.where(counted, scores.double(), 0.0).sum(dim=1)
                greedy &= ((each.argmax(dim=-1) == said) | ~counted).all(dim=1)
            self.cache_stats.append(cache.stats())
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    def _feed(
        self, cache: KVCache, ids: torch.Tensor, mask: torch.Tensor, length: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Feeds the context and then the rest. For each of its last token and the parts after it:
        columns, and their logits."""
        chunk = self._prefill_chunk or length
        bounds = [
            *range(0, length, chunk),
            *range(length, ids.shape[1], self._verify_chunk),
            ids.shape[1],
        ]
        takes = inspect.signature(self.model.forward).parameters
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        for begin, end in itertools.pairwise(bounds):
            wanted = 1 if end <= length else end - begin
            inputs: dict[str, Any] = {
                "attention_mask": mask[:, :end],
                "position_ids": positions[:, begin:end],
            }
            inputs = {
                name: value.to(self.device) for name, value in inputs.items() if name in takes
            }
            if "logits_to_keep" in takes:
                inputs["logits_to_keep"] = wanted
            with (
                torch.no_grad(),
                torch.autocast(
                    device_type=self.device.type,
                    dtype=self.mixed_precision_dtype,
                    enabled=self.mixed_precision_dtype is not None,
                ),
            ):
                logits = self.model(
                    ids[:, begin:end].to(self.device),
                    past_key_values=cache,
                    use_cache=True,
                    **inputs,
                ).logits
            if end >= length:
                yield end - wanted, end, logits[:, -wanted:]


def main() -> None:
    """The harness's own command line, with the model ``espnx``."""
    try:
        cli_evaluate()
    except errors.EspnxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
