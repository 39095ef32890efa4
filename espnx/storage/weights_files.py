"""Tensors in safetensors files: where each lies. Headers are read and checked, tensors are not.

A file is 8 bytes (length of the header, little endian), the header (JSON: dtype, shape and data offsets of each tensor), and the data.
The format has no checksums: what can be checked is that the header and the file's size agree to the byte.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from .. import errors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        offset_bytes: from the beginning of the file.
    """

    name: str
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_tensors(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """All tensors of a model's folder: ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    Raises:
        InvalidInputError: no such files in the folder.
        FormatError, TruncatedFileError: a file is damaged, or index and shards contradict each other.
    """
    where = Path(folder)
    index = where / INDEX
    if not index.is_file():
        if not (where / SINGLE).is_file():
            raise errors.InvalidInputError(
                f"weights in {where}", got=f"neither {SINGLE} nor {INDEX}", expected="one of them",
                fix="save the model again with a recent transformers: save_pretrained writes safetensors",
            )  # fmt: skip
        return read_header(where / SINGLE)
    places = _weight_map(index)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise errors.FormatError("read the index of shards", path=index, got=repr(name), expected="names of files in the same folder")
        if not (where / name).is_file():
            raise errors.FormatError(
                "read the shards of a model", path=index, got=f"no file {name}", expected="all shards in the same folder"
            )
        for tensor in read_header(where / name).values():
            if tensor.name in found:
                raise errors.FormatError("read a shard", path=where / name, got=f"{tensor.name} a second time", expected="each tensor once")
            found[tensor.name] = tensor
    for tensor_name, file_name in places.items():
        if tensor_name not in found or os.path.basename(found[tensor_name].path) != file_name:
            raise errors.FormatError(
                "read a shard", path=where / file_name, got=f"no {tensor_name}", expected="what the index says is there"
            )
    return found


def _weight_map(index: Path) -> dict[str, str]:
    document = _parse(index, index.read_bytes())
    places = document.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise errors.FormatError("read the index of shards", path=index, got="no weight_map", expected="names of tensors and their files")
    return places


def read_header(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises FormatError, TruncatedFileError, ReadError."""
    name = os.fspath(path)
    try:
        size_bytes = os.path.getsize(name)
        with open(name, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or header_bytes > min(_HEADER_BYTES_MAX, size_bytes - 8):
                raise errors.TruncatedFileError(
                    "read the header of a safetensors file", path=name, got=f"{size_bytes} bytes, a header of {header_bytes}",
                    expected=f"a header of at most {_HEADER_BYTES_MAX} bytes inside the file",
                )  # fmt: skip
            header = _parse(name, file.read(header_bytes))
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError("cannot read the header of a safetensors file", path=name, errno=error.errno) from error
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    tensors = [_tensor(name, key, value, data) for key, value in header.items()]
    at = data
    for tensor in sorted(tensors, key=lambda item: (item.offset_bytes, item.size_bytes)):
        if tensor.offset_bytes != at:
            raise errors.FormatError(
                f"place of {tensor.name}",
                path=name,
                got=f"offset {tensor.offset_bytes}",
                expected=f"{at}: tensors without holes or overlap",
            )
        at += tensor.size_bytes
    if size_bytes < at:
        raise errors.TruncatedFileError("a safetensors file is cut", path=name, got=f"{size_bytes} bytes", expected=f"{at} bytes")
    if size_bytes > at:
        raise errors.FormatError(
            "read a safetensors file", path=name, got=f"{size_bytes} bytes", expected=f"{at} bytes, as its header says"
        )
    return {tensor.name: tensor for tensor in tensors}


def _parse(path: str | os.PathLike[str], text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.FormatError("parse JSON", path=path, got=str(error), expected="a whole file") from error
    if not isinstance(value, dict):
        raise errors.FormatError("parse JSON", path=path, got=type(value).__name__, expected="an object")
    return value


def _tensor(path: str, name: str, value: Any, data: int) -> StoredTensor:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise errors.FormatError(f"dtype of {name}", path=path, got=repr(dtype), expected=", ".join(_DTYPES))
    if not _is_list_of_sizes(shape) or not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise errors.FormatError(f"header of {name}", path=path, got=repr(value), expected="a shape and two offsets")
    tensor = StoredTensor(name, path, _DTYPES[dtype], tuple(shape), data + offsets[0])
    if offsets[1] - offsets[0] != tensor.size_bytes:
        raise errors.FormatError(
            f"size of {name}", path=path, got=f"{offsets[1] - offsets[0]} bytes", expected=f"{tensor.size_bytes} bytes for {dtype} {shape}"
        )
    return tensor


def _is_list_of_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
