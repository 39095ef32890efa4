"""A folder with a model and its tokenizer: loaded, and told from what lay there before."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ... import errors
from ...encoders.checkpoints import TOKENIZER_FILES
from ...suggestions import downloading
from ...weights.safetensors_files import read_header
from ..streamed.load import load_streamed
from ..transformers.gguf import find_gguf, load_gguf

#: Bytes that are read of each tensor's beginning and end, or of a weight file's where it is not
#: known what lies in it.
_TENSOR_SAMPLE_BYTES, _FILE_SAMPLE_BYTES = 4096, 2**20


_EXPECTED = "a folder with model and tokenizer, or a GGUF file"


def _check_folder(path: str) -> None:
    if not os.path.isdir(path) and find_gguf(path) is None:
        raise errors.InvalidInputError(
            f"model in {path}",
            got="no such folder",
            expected=_EXPECTED,
            fix=downloading(os.fspath(path)),
        )
    if (
        os.path.isdir(path)
        and find_gguf(path) is None
        and not os.path.isfile(os.path.join(path, "config.json"))
    ):
        raise errors.InvalidInputError(
            f"model in {path}", got="a folder without config.json", expected=_EXPECTED
        )


def model_fingerprint(path: str) -> str:
    """A hash of a model's folder: config and tokenizer, and of its weights names, sizes and a part
    of each tensor, which changes where it was trained on; of a GGUF file: all of it. The same for a
    copy. Raises InvalidInputError, ReadError."""
    _check_folder(path)
    folder, digest, gguf = Path(path), hashlib.sha256(), find_gguf(path)
    small = (
        []
        if gguf
        else [folder / name for name in ("config.json", "generation_config.json", *TOKENIZER_FILES)]
    )
    weights = (
        [gguf]
        if gguf
        else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    )
    for file in [*(file for file in small if file.is_file()), *weights]:
        try:
            digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
            digest.update(_sample(file) if file.suffix == ".safetensors" else _whole(file))
        except OSError as error:
            raise errors.ReadError("cannot read the model", path=file, errno=error.errno) from error
    return digest.hexdigest()[:16]


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sample(path: Path) -> bytes:
    """A digest of a file's header and of both ends of every tensor."""
    try:
        tensors = read_header(path).values()
        header_bytes = min((tensor.offset_bytes for tensor in tensors), default=path.stat().st_size)
        spans = [(0, header_bytes)]
        for tensor in tensors:
            spans += _ends(tensor.offset_bytes, tensor.size_bytes, _TENSOR_SAMPLE_BYTES)
    except errors.StorageError:
        # not a format that is read here; the loader says whether it is damaged
        spans = _ends(0, path.stat().st_size, _FILE_SAMPLE_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset, length in spans:
            file.seek(offset)
            digest.update(file.read(length))
    return digest.digest()


def _ends(offset: int, length: int, each: int) -> list[tuple[int, int]]:
    return (
        [(offset, length)]
        if length <= 2 * each
        else [(offset, each), (offset + length - each, each)]
    )


def load_model(path: str, memory: str | None, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or a GGUF file; with `memory`, weights that do not fit into it
    are streamed. The framework's own progress bar is off.

    Raises InvalidInputError where the folder holds none, or a GGUF file is to be streamed; what
    `load_gguf` raises.
    """
    _check_folder(path)
    logging.disable_progress_bar()  # of the process
    if (gguf := find_gguf(path)) is not None:
        if memory is not None:
            raise errors.InvalidInputError(
                f"streamed weights of {gguf}",
                got="a GGUF file",
                expected="safetensors",
                fix=(
                    "model, tokenizer = espnx.load_gguf(...); save_pretrained(folder) of both; "
                    "name that folder"
                ),
            )
        return load_gguf(gguf, dtype or torch.float32)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if memory is not None:
            return load_streamed(path, memory=memory, dtype=dtype), tokenizer
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True
        ).eval(), tokenizer
    except (OSError, ValueError) as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.InvalidInputError(
            f"model in {path}", got=str(error).splitlines()[0], expected=_EXPECTED
        ) from error
