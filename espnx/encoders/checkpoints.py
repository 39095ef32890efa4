"""Reading the folders of trained encoders: JSON, weights, tokenizer, and a fingerprint. No code and
no unrestricted pickle is run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import EspnxError, FormatError, InvalidInputError, MissingDependencyError
from ..forks import compute_alone
from .torch_files import load_torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
POSITIONS_DEFAULT = 512
_BINARY = "pytorch_model*.bin"
_TOKENIZE_AT_ONCE = 1024  # texts; an encoding holds some 100 bytes a token until its ids are taken


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises InvalidInputError where it is not there, FormatError
    where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(
            f"read {path}", got=error.strerror, expected="a readable JSON file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "parse JSON", path=path, got=str(error), expected="a whole file"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises what `read_json` raises, and FormatError for any other
    value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatError("parse JSON", path=path, got=type(value).__name__, expected="an object")
    return value


def weight_files(folder: Path, *, pickled: bool = False) -> list[Path]:
    """The weights of a transformers folder: safetensors, or with `pickled` also
    ``pytorch_model*.bin`` where there are none.

    Raises:
        InvalidInputError: there is no config.json, or there are no weights.
    """
    if not (folder / "config.json").is_file():
        raise InvalidInputError(
            f"encoder folder {folder}",
            got="no config.json in it",
            expected="a Hugging Face model's folder",
        )
    weights = sorted(folder.glob("*.safetensors")) or (
        sorted(folder.glob(_BINARY)) if pickled else []
    )
    if not weights:
        raise InvalidInputError(
            f"encoder folder {folder}",
            got="no *.safetensors in it",
            expected="weights as safetensors" + ("" if pickled else " (pickled ones are not read)"),
            fix=(
                "save the model again with a recent transformers: save_pretrained writes "
                "safetensors"
            ),
        )
    return weights


def load_transformer(
    folder: Path,
    dtype: torch.dtype,
    *,
    pickled: bool = False,
    kind: str = "AutoModel",
    whole: bool = False,
) -> tuple[Any, Any]:
    """Model and tokenizer of a folder. A weight that the files lack would be random numbers and a
    log line: here it is an error.

    Args:
        folder: of a transformers model.
        dtype: of its weights in memory.
        pickled: whether ``pytorch_model*.bin`` is read where there are no safetensors.
        kind: the class of transformers that loads it.

    Raises:
        MissingDependencyError: transformers is not installed.
        InvalidInputError: not such a folder, or an encoder-decoder.
        FormatError: the files are damaged, or do not hold all of the model's weights.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "Hugging Face encoder",
            got=str(error),
            expected="transformers",
            fix="pip install transformers",
        ) from error
    compute_alone()
    files = weight_files(folder, pickled=pickled)
    safe = files[0].suffix == ".safetensors"
    for path in () if safe else files:
        load_torch(path)  # maps it, reads little: damage and refused contents get an error of ours
    bar, level = (
        transformers.utils.logging.is_progress_bar_enabled(),
        transformers.utils.logging.get_verbosity(),
    )
    transformers.utils.logging.disable_progress_bar()
    # it reports weights of heads that are read here, and unused poolers
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if (config.is_encoder_decoder and kind == "AutoModel") or not hasattr(
            config, "hidden_size"
        ):
            raise InvalidInputError(
                f"encoder folder {folder}",
                got=f"a model of type {config.model_type}",
                expected="a text encoder",
            )
        if safe:
            _check_size(folder, config, files)
        model, info = getattr(transformers, kind).from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=safe,
            dtype=dtype,
            output_loading_info=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except EspnxError:
        raise
    except Exception as error:
        # whatever hostile settings provoke: ValueError, KeyError, TypeError, ZeroDivisionError,
        # Exception, ...
        got = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FormatError(
            "load the encoder", path=folder, got=got, expected="a whole model"
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(level)
        if bar:
            transformers.utils.logging.enable_progress_bar()
    # the pooler is not used, and many encoders have none
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise FormatError(
            "load the encoder",
            path=folder,
            got=f"{len(missing)} weights missing, the first {missing[0]}",
            expected="all of them",
        )
    return model, tokenizer


def _check_size(folder: Path, config: Any, files: Iterable[Path]) -> None:
    """Raises FormatError where a configuration asks for more than the weights are: memory and time
    would go into what is not there."""
    shapes = [shape for path in files for shape in _shapes(path)]
    held = sum(math.prod(shape) for shape in shapes)
    wanted = {
        name: getattr(config, name, 0)
        for name in ("vocab_size", "hidden_size", "max_position_embeddings", "num_hidden_layers")
    }
    for name, value in wanted.items():
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 0
        ):
            raise FormatError(
                "settings of an encoder",
                path=folder / "config.json",
                got=f"{name} {value!r}",
                expected="a whole number",
            )
    layers, rows = (
        wanted["num_hidden_layers"] or 0,
        max(wanted["vocab_size"] or 0, wanted["max_position_embeddings"] or 0),
    )
    if layers > len(shapes) or rows * (wanted["hidden_size"] or 0) > held:
        raise FormatError(
            "settings of an encoder",
            path=folder / "config.json",
            got=", ".join(f"{name} {value}" for name, value in wanted.items()),
            expected=f"no more than its weights hold: {len(shapes)} tensors of {held} values",
        )


def _shapes(path: Path) -> list[list[int]]:
    """The shapes of the tensors of a safetensors file, from its head. Raises what safetensors
    raises."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no mapping


def read_weights(files: Iterable[Path], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of those names that the files hold, float32. Raises FormatError where a file is
    damaged."""
    wanted, found = set(names), {}
    for path in files:
        if path.suffix == ".safetensors":
            found.update(_read_safetensors(path, wanted))
        else:
            held = load_torch(path)
            found.update(
                {name: held[name] for name in wanted & set(held)} if isinstance(held, dict) else {}
            )
    return {name: tensor.float() for name, tensor in found.items()}


def _read_safetensors(path: Path, wanted: set[str]) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError(
            "read weights", got=str(error), expected="safetensors", fix="pip install safetensors"
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in wanted & set(file.keys())}
    except (SafetensorError, OSError) as error:
        raise FormatError(
            "read weights", path=path, got=str(error), expected="a whole file"
        ) from error


def positions(config: Any, tokenizer: Any) -> int:
    """Most positions that the model can hold; RoBERTa's family loses those up to its padding id,
    1."""
    limit: int = getattr(config, "max_position_embeddings", None) or POSITIONS_DEFAULT
    if getattr(config, "pad_token_id", None) == 1:
        limit -= 2
    return min(limit, tokenizer.model_max_length)


def wordpieces(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """Yields each text's ids without special tokens, not truncated; a special token that is written
    in a text is text."""
    for begin in range(0, len(texts), _TOKENIZE_AT_ONCE):
        # verbose=False: it would warn of texts that are longer than the model, which is what
        # windows are for
        yield from tokenizer(
            texts[begin : begin + _TOKENIZE_AT_ONCE],
            add_special_tokens=False,
            split_special_tokens=True,
            truncation=False,
            verbose=False,
        )["input_ids"]


def special_ids(tokenizer: Any, folder: Path) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    probe = tokenizer("a", return_special_tokens_mask=True)
    ids, special = probe["input_ids"], probe["special_tokens_mask"]
    if 0 not in special:
        raise InvalidInputError(
            f"encoder folder {folder}",
            got='a tokenizer without a token for "a"',
            expected="a text tokenizer",
        )
    begin, end = special.index(0), len(special) - special[::-1].index(0)
    return ids[:begin], ids[end:]


def fingerprint(folder: Path, weights: Iterable[Path], *others: Path) -> str:
    """A hash of the contents of config, tokenizer and weights (and of other files), not of where
    they are."""
    digest = hashlib.sha256()
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for path in [folder / "config.json", *tokenizer, *weights, *others]:
        with path.open("rb") as file:
            digest.update(
                f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return digest.hexdigest()
