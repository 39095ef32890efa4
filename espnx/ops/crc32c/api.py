"""CRC32C for callers: of one piece of data, and of many ranges of an I/O buffer at once."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...errors import InvalidInputError
from .._native import is_direct, load_extension, load_ops
from .checks import check_inside, check_ranges, check_seed
from .cpu import crc32c_cpu
from .cuda import crc32c_cuda, crc32c_inside_cuda


def crc32c(data: bytes | bytearray | memoryview | torch.Tensor, seed: int = 0) -> int:
    """The CRC32C of ``data``, which is not copied.

    Args:
        data: contiguous bytes, or a contiguous tensor of any dtype and shape, of which the bytes in
            memory count.
        seed: the CRC32C of what came before, 0 at the start: ``crc32c(b, crc32c(a)) == crc32c(a +
            b)``.

    Returns:
        An integer from 0 to 2^32 - 1.

    Raises:
        InvalidInputError: ``data`` is not contiguous, or ``seed`` is out of range.
        MissingDependencyError: the extension is not built.
    """
    check_seed(seed)
    buffer = _tensor_bytes(data) if isinstance(data, torch.Tensor) else _object_bytes(data)
    if is_direct(buffer):
        return load_extension().crc32c(buffer.data_ptr(), buffer.numel(), seed)
    load_ops()
    whole = torch.tensor([buffer.numel()])
    return int(torch.ops.espnx.crc32c(buffer, torch.zeros_like(whole), whole, seed))


def crc32c_ranges(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, size_bytes: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """The CRC32C of each of n ranges of an I/O buffer, in place.

    Args:
        buffer: uint8 ``[bytes]``, contiguous.
        offset_bytes: int64 ``[n]``, where each range begins; ranges may overlap and come in any
            order.
        size_bytes: int64 ``[n]``, 0 allowed. This and ``offset_bytes`` may stay on the CPU for a
            CUDA buffer.
        seed: the CRC32C that every range continues from, 0 to start.

    Returns:
        int64 ``[n]``, each from 0 to 2^32 - 1, on the buffer's device.

    Raises:
        InvalidInputError: a wrong dtype, shape or device, or a range outside the buffer (checked
            before any byte is read).
        MissingDependencyError: the extension is not built, or on CUDA Triton is not installed.
    """
    check_ranges(buffer, offset_bytes, size_bytes, seed)
    try:
        if is_direct(buffer):
            return crc32c_cpu(buffer, offset_bytes, size_bytes, seed)
        if is_direct(buffer, on="cuda"):
            return crc32c_cuda(buffer, offset_bytes, size_bytes, seed)
        load_ops()
        return torch.ops.espnx.crc32c(buffer, offset_bytes, size_bytes, seed)
    except IndexError as error:
        # C++ looks at each range once; Python looks again only where it has found one outside
        if buffer.device.type != "cpu":
            raise
        found = error
    check_inside(buffer.numel(), offset_bytes, size_bytes)
    raise found


def crc32c_inside(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    size_bytes: torch.Tensor,
    *,
    has_whole_words: bool,
) -> torch.Tensor:
    """`crc32c_ranges` of ranges that are known to lie inside the buffer, given where the buffer is:
    nobody looks at them, and so the host does not wait for a device. `has_whole_words`: every range
    begins and ends on an address that is a multiple of 4. On the CPU ranges are checked all the
    same."""
    if is_direct(buffer):
        return crc32c_cpu(buffer, offset_bytes, size_bytes)
    if is_direct(buffer, on="cuda"):
        return crc32c_inside_cuda(buffer, offset_bytes, size_bytes, has_whole_words)
    load_ops()
    return torch.ops.espnx.crc32c_inside(buffer, offset_bytes, size_bytes, has_whole_words)


def _tensor_bytes(data: torch.Tensor) -> torch.Tensor:
    if not data.is_contiguous():
        raise InvalidInputError(
            "crc32c data",
            got="a strided tensor",
            expected="a contiguous one",
            fix="data.contiguous()",
        )
    return data.detach().reshape(-1).view(torch.uint8)


def _object_bytes(data: bytes | bytearray | memoryview) -> torch.Tensor:
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInputError(
            "crc32c data",
            got="a strided memoryview",
            expected="contiguous bytes",
            fix="bytes(data)",
        )
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # By address, because torch warns of read-only memory such as bytes, and the op only reads. The
    # caller's `data` outlives the call.
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * view.nbytes).from_address(address), dtype=torch.uint8)
