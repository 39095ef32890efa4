"""A folder with a model and its tokenizer: loaded, and told from what lay there before."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ... import errors
from ...encoders.checkpoints import TOKENIZER_FILES
from ...weights.safetensors_files import read_header
from ..streamed.load import load_streamed

#: Bytes that are read of each tensor's beginning and end, or of a weight file's where it is not known what lies in it.
_TENSOR_SAMPLE_BYTES, _FILE_SAMPLE_BYTES = 4096, 2**20


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise errors.InvalidInputError(f"model in {path}", got="no such folder", expected="a folder with model and tokenizer")


def model_fingerprint(path: str) -> str:
    """A hash of a model's folder: config and tokenizer, and of its weights names, sizes and a part of each tensor, which changes where it
    was trained on. The same for a copy of the folder. Raises InvalidInputError, ReadError."""
    _check_folder(path)
    folder, digest = Path(path), hashlib.sha256()
    small = [folder / name for name in ("config.json", "generation_config.json", *TOKENIZER_FILES)]
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
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
    except errors.StorageError:  # not a format that is read here; the loader says whether it is damaged
        spans = _ends(0, path.stat().st_size, _FILE_SAMPLE_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset, length in spans:
            file.seek(offset)
            digest.update(file.read(length))
    return digest.digest()


def _ends(offset: int, length: int, each: int) -> list[tuple[int, int]]:
    return [(offset, length)] if length <= 2 * each else [(offset, each), (offset + length - each, each)]


def load_model(path: str, memory: str | None, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder; with `memory`, weights that do not fit into it are streamed.

    Raises InvalidInputError where the folder holds none.
    """
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if memory is not None:
            return load_streamed(path, memory=memory, dtype=dtype), tokenizer
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True).eval(), tokenizer
    except (OSError, ValueError) as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.InvalidInputError(
            f"model in {path}", got=str(error).splitlines()[0], expected="a folder with model and tokenizer"
        ) from error
