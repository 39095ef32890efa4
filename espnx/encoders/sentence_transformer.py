"""Folders of sentence-transformers that give one vector a text: a transformer, a pooling, dense
layers, a scaling to length 1.

GTR (Ni et al., "Large Dual Encoders Are Generalizable Retrievers", arXiv 2112.07899) is one: the
encoder of T5, the mean, a dense layer without bias, length 1. Vectors are those of the package, to
rounding; texts are cut at the model's own length, as it does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import FormatError, InvalidInputError
from ..forks import compute_alone
from ..ops.precision import whole_float32
from ..retrieval.single_vector import SingleVectorEncoder
from .checkpoints import (
    fingerprint,
    load_transformer,
    positions,
    read_json,
    read_object,
    weight_files,
)
from .dense_layer import check_chain, dense_files, read_dense
from .late_interaction import settings_hash
from .windows import LENGTH_STEP, batches, named, torch_dtype

MODULES, SETTINGS, TRANSFORMER = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
POOLINGS = ("cls", "mean", "max")
# Of an encoder-decoder, the class of transformers that is its encoder alone.
_T5 = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
_TEXTS_AT_ONCE = 1024
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def is_sentence_transformer(folder: Path) -> bool:
    """Whether a folder's vector is more than its transformer's pooled states, so that nothing but
    the whole chain will do."""
    if not (folder / MODULES).is_file():
        return False
    modules = modules_of(folder)
    kind = (
        read_object(modules[0][1] / "config.json").get("model_type")
        if (modules[0][1] / "config.json").is_file()
        else None
    )
    return kind in _T5 or any(name == "Dense" for name, _ in modules)


def modules_of(folder: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of all modules; the first is a transformer. Raises FormatError for
    another list."""
    listed = read_json(folder / MODULES)
    try:
        found = [
            (str(item["type"]).rpartition(".")[2], folder / str(item["path"])) for item in listed
        ]
    except (TypeError, KeyError) as error:
        raise FormatError(
            "list of modules",
            path=folder / MODULES,
            got=repr(error),
            expected="a list with type and path",
        ) from error
    if not found or found[0][0] != "Transformer":
        raise FormatError(
            "list of modules",
            path=folder / MODULES,
            got=[name for name, _ in found],
            expected="first a Transformer",
        )
    return found


class SentenceTransformerEncoder(SingleVectorEncoder):
    """The vector of a text from a folder that sentence-transformers saved.

    Args:
        folder: with ``modules.json``: a Transformer (an encoder that ``AutoModel`` loads, or T5, of
            which the encoder is taken), a Pooling (``cls``, ``mean`` or ``max``), and any of Dense
            and Normalize after it. Prompts of queries and documents are put before texts as the
            folder says.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Results are on the CPU in any case.
        dtype: of the forward pass: ``"fp32"``, or ``"bf16"``, which differs, and is faster on
            hardware for it (docs/encoders.md).
        batch_tokens: most positions in one forward pass (a single longer text goes alone).

    ``name`` is made from a hash of weights, tokenizer and settings: it does not change when the
    folder moves.

    Raises:
        MissingDependencyError: transformers is not installed.
        InvalidInputError: not such a folder, another pooling or module, or an argument out of
            range.
        FormatError: the files are damaged, or do not hold all of the model's weights.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        batch_tokens: int = 4096,
    ):
        if not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise InvalidInputError(
                "encoder: batch_tokens", got=batch_tokens, expected="at least 1"
            )
        root = Path(folder)
        self.batch_tokens, self.device, self.dtype = (
            batch_tokens,
            torch.device(device),
            torch_dtype(dtype),
        )
        modules = modules_of(root)
        self.folder = modules[0][1]
        weights = weight_files(self.folder, pickled=True)
        kind = read_object(self.folder / "config.json").get("model_type")
        loader = _T5.get(str(kind), "AutoModel")
        self._model, self._tokenizer = load_transformer(
            self.folder, self.dtype, pickled=True, kind=loader
        )
        self._model.to(self.device).eval()
        self._layers = [
            read_dense(where, self.device, self.dtype, "Tanh")
            for name, where in modules
            if name == "Dense"
        ]
        self._steps = self._chain(root, modules)
        self.settings = self._settings(root)
        self.settings["steps"] = [name for name, _ in modules[1:]]
        check_chain(self._layers, self._model.config.hidden_size, root)
        self.dim = len(self._layers[-1].weight) if self._layers else self._model.config.hidden_size
        others = [
            path
            for name, where in modules
            if name == "Dense"
            for path in (where / "config.json", *dense_files(where))
        ]
        contents = fingerprint(self.folder, weights, *others)
        self.name = named(
            f"st-{kind}@{settings_hash(contents, sorted(self.settings.items()))}", self.dtype
        )

    def _chain(self, root: Path, modules: list[tuple[str, Path]]) -> list[Any]:
        """What is done to the pooled vector, in order."""
        names = [name for name, _ in modules[1:]]
        if names[:1] != ["Pooling"] or not set(names[1:]) <= {"Dense", "Normalize", "Dropout"}:
            raise InvalidInputError(
                f"sentence-transformers folder {root}",
                got=", ".join(names) or "no pooling",
                expected="Pooling, then Dense and Normalize",
            )
        layers = iter(self._layers)
        scaling = {"Normalize": lambda x: normalize(x, dim=-1)}
        return [
            next(layers) if name == "Dense" else scaling[name]
            for name in names[1:]
            if name != "Dropout"
        ]

    def _settings(self, root: Path) -> dict[str, Any]:
        stored = read_object(root / SETTINGS) if (root / SETTINGS).is_file() else {}
        own = (
            read_object(self.folder / TRANSFORMER) if (self.folder / TRANSFORMER).is_file() else {}
        )
        pooling = read_object(modules_of(root)[1][1] / "config.json")
        prompts = stored.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(
            text is None or isinstance(text, str) for text in prompts.values()
        ):
            raise FormatError(
                "prompts", path=root / SETTINGS, got=repr(prompts)[:80], expected="texts by name"
            )
        default = prompts.get(stored.get("default_prompt_name")) or ""
        document = next((name for name in _DOCUMENT_PROMPTS if name in prompts), None)
        made = {
            "query_prompt": (prompts["query"] or "") if "query" in prompts else default,
            "document_prompt": (prompts[document] or "") if document else default,
            "do_lower_case": bool(own.get("do_lower_case")),
            "pooling": _pooling_of(pooling, root),
            "length": self._length(own.get("max_seq_length")),
        }
        if not pooling.get("include_prompt", True) and (
            made["query_prompt"] or made["document_prompt"]
        ):
            raise InvalidInputError(
                f"sentence-transformers folder {root}",
                got="a pooling that leaves prompts out",
                expected="one of all tokens",
            )
        return made

    def _length(self, given: Any) -> int:
        most = positions(self._model.config, self._tokenizer)
        if given is None:
            return most
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise FormatError(
                "length of a model",
                path=self.folder / TRANSFORMER,
                got=repr(given),
                expected="a whole number",
            )
        return min(given, most)

    def vectors(self, texts: list[str], *, is_query: bool) -> Tensor:
        compute_alone()
        prompt = self.settings["query_prompt" if is_query else "document_prompt"]
        found = torch.empty(len(texts), self.dim)
        for begin in range(0, len(texts), _TEXTS_AT_ONCE):
            chunk = [prompt + text for text in texts[begin : begin + _TEXTS_AT_ONCE]]
            if self.settings["do_lower_case"]:
                chunk = [text.lower() for text in chunk]
            rows = self._tokenizer(
                chunk, truncation=True, max_length=self.settings["length"], verbose=False
            )["input_ids"]
            for batch in batches([self._padded(len(ids)) for ids in rows], self.batch_tokens):
                found[begin + torch.tensor(batch)] = self._forward([rows[index] for index in batch])
        return found

    def _padded(self, length: int) -> int:
        return max(
            1, min(-(-length // LENGTH_STEP) * LENGTH_STEP, max(length, self.settings["length"]))
        )

    def _forward(self, rows: list[list[int]]) -> Tensor:
        """float32 ``[rows, dim]`` on the CPU."""
        longest = self._padded(max(map(len, rows)))
        ids = torch.full((len(rows), longest), self._tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[number, : len(row)] = True
        if int(ids.max()) >= self._model.config.vocab_size:
            raise InvalidInputError(
                f"encode with {self.folder}",
                got=f"token id {int(ids.max())}",
                expected=f"ids below the model's {self._model.config.vocab_size}",
                fix="use the tokenizer that belongs to the model",
            )
        ids, mask = ids.to(self.device), mask.to(self.device)
        with torch.inference_mode(), whole_float32():
            states = self._model(
                input_ids=ids, attention_mask=mask.to(torch.int64)
            ).last_hidden_state
            vectors = _pooled(states, mask, self.settings["pooling"])
            for step in self._steps:
                vectors = step(vectors)
            return vectors.to("cpu", torch.float32)


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """``[B, hidden]`` of ``[B, L, hidden]`` and its mask."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return states.masked_fill(~mask[..., None], float("-inf")).amax(1)
    weights = mask[..., None].to(torch.float32)
    return ((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)).to(states.dtype)


def _pooling_of(config: dict[str, Any], root: Path) -> str:
    """The one pooling that a module's config names, in the form of any release."""
    named = config.get("pooling_mode")
    flags = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
    }
    switched = [
        flags.get(key, key)
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    chosen = (
        [named]
        if isinstance(named, str)
        else list(named)
        if isinstance(named, list)
        else switched or ["mean"]
    )
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise InvalidInputError(
            f"sentence-transformers folder {root}",
            got=f"pooling {chosen}",
            expected=f"one of {', '.join(POOLINGS)}",
        )
    return str(chosen[0])
