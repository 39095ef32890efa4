"""Tensors in safetensors files: where each lies. Headers are read and checked, tensors are not.

A file is 8 bytes (length of the header, little endian), the header (JSON: dtype, shape and data
offsets of each tensor), and the data. The format has no checksums: what can be checked is that the
header and the file's size agree to the byte.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import errors
from ..storage.parse import LARGEST, Fields, check_plain_file, parse_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES_MAX = 32 << 20  # Python's objects take about twenty times that
_DIMENSIONS_MAX = 16
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
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
    """All tensors of a model's folder: ``model.safetensors``, or the shards that
    ``model.safetensors.index.json`` names.

    Raises:
        InvalidInputError: no such files in the folder.
        FormatError, TruncatedFileError: a file is damaged, or index and shards contradict each
            other.
    """
    where = Path(folder)
    index = where / INDEX
    if not index.is_file():
        if not (where / SINGLE).is_file():
            raise errors.InvalidInputError(
                f"weights in {where}",
                got=f"neither {SINGLE} nor {INDEX}",
                expected="one of them",
                fix=(
                    "save the model again with a recent transformers: save_pretrained writes "
                    "safetensors"
                ),
            )
        return read_header(where / SINGLE)
    places = _weight_map(index)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if not name.endswith(".safetensors"):
            raise errors.FormatError(
                "read the index of shards",
                path=index,
                got=repr(name),
                expected="names of files in the same folder",
            )
        if not (where / name).is_file():
            raise errors.FormatError(
                "read the shards of a model",
                path=index,
                got=f"no file {name}",
                expected="all shards in the same folder",
            )
        for tensor in read_header(where / name).values():
            if tensor.name in found:
                raise errors.FormatError(
                    "read a shard",
                    path=where / name,
                    got=f"{tensor.name} a second time",
                    expected="each tensor once",
                )
            found[tensor.name] = tensor
    for tensor_name, file_name in places.items():
        if tensor_name not in found or os.path.basename(found[tensor_name].path) != file_name:
            raise errors.FormatError(
                "read a shard",
                path=where / file_name,
                got=f"no {tensor_name}",
                expected="what the index says is there",
            )
    return found


def _weight_map(index: Path) -> dict[str, str]:
    size_bytes = index.stat().st_size
    if size_bytes > _HEADER_BYTES_MAX:
        raise errors.FormatError(
            "read the index of shards",
            path=index,
            got=f"{size_bytes} bytes",
            expected=f"at most {_HEADER_BYTES_MAX}",
        )
    places = parse_object(index.read_bytes(), index, what="index of shards").inner("weight_map")
    found = {name: places.file_name(name) for name in places}
    if not found:
        raise errors.FormatError(
            "read the index of shards",
            path=index,
            got="no weight_map",
            expected="names of tensors and their files",
        )
    return found


def read_header(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises FormatError, TruncatedFileError, ReadError."""
    name = os.fspath(path)
    try:
        # model hubs lay out their folders with links
        size_bytes = check_plain_file(os.path.realpath(name))
        with open(name, "rb") as file:
            return _tensors(name, _header(name, size_bytes, file.read), size_bytes)
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError(
            "cannot read the header of a safetensors file", path=name, errno=error.errno
        ) from error


def read_tensors(data: bytes, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that is in memory, as copies. `path`: for messages. Raises
    FormatError, TruncatedFileError."""
    name = os.fspath(path)
    tensors = _tensors(name, _header(name, len(data), io.BytesIO(data).read), len(data))
    found = {}
    for key, tensor in tensors.items():
        own = bytearray(data[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes])
        found[key] = (
            torch.frombuffer(own, dtype=tensor.dtype) if own else torch.empty(0, dtype=tensor.dtype)
        ).reshape(tensor.shape)
    return found


def _header(name: str, size_bytes: int, read: Callable[[int], bytes]) -> tuple[Fields, int]:
    """(the fields of a header, where the data after it begins)."""
    header_bytes = int.from_bytes(read(8), "little")
    if size_bytes < 8 or header_bytes > min(_HEADER_BYTES_MAX, size_bytes - 8):
        raise errors.TruncatedFileError(
            "read the header of a safetensors file",
            path=name,
            got=f"{size_bytes} bytes, a header of {header_bytes}",
            expected=f"a header of at most {_HEADER_BYTES_MAX} bytes inside the file",
        )
    return parse_object(
        read(header_bytes), name, what="header of a safetensors file"
    ), 8 + header_bytes


def _tensors(name: str, header: tuple[Fields, int], size_bytes: int) -> dict[str, StoredTensor]:
    fields, at = header
    tensors = [_tensor(name, key, fields.inner(key), at) for key in fields if key != "__metadata__"]
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
        raise errors.TruncatedFileError(
            "a safetensors file is cut",
            path=name,
            got=f"{size_bytes} bytes",
            expected=f"{at} bytes",
        )
    if size_bytes > at:
        raise errors.FormatError(
            "read a safetensors file",
            path=name,
            got=f"{size_bytes} bytes",
            expected=f"{at} bytes, as its header says",
        )
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: str, name: str, fields: Fields, data: int) -> StoredTensor:
    dtype = fields.choice("dtype", _DTYPES)
    shape, offsets = (
        fields.wholes("shape", count=_DIMENSIONS_MAX),
        fields.wholes("data_offsets", count=2),
    )
    if len(offsets) != 2:
        fields.refuse("data_offsets", "two offsets")
    # also of a tensor without elements, which has strides all the same
    if math.prod(size for size in shape if size) > LARGEST:
        fields.refuse("shape", f"at most {LARGEST} elements")
    tensor = StoredTensor(name, path, _DTYPES[dtype], tuple(shape), data + offsets[0])
    if offsets[1] - offsets[0] != tensor.size_bytes:
        raise errors.FormatError(
            f"size of {name}",
            path=path,
            got=f"{offsets[1] - offsets[0]} bytes",
            expected=f"{tensor.size_bytes} bytes for {dtype} {shape}",
        )
    return tensor
