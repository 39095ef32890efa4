"""No byte beyond a record is read: records that end where readable memory ends, in a process that
may crash."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.forks import Forks

PROGRAM = """
import ctypes, mmap
import torch
from espnx.ops import crc32c_ranges, maxsim
from espnx.ops._native import load_extension
from espnx.ops.maxsim import FORMATS, Codebook

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for guard in (address, address + 2 * page):
    assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0, ctypes.get_errno()
middle = torch.frombuffer((ctypes.c_uint8 * page).from_address(address + page), dtype=torch.uint8)
for level in range(load_extension().set_cpu_level(-1) + 1):
    load_extension().set_cpu_level(level)
    for d in (8, 24, 40, 72):
        for fmt, token in FORMATS.items():
            codebook = None
            if token.needs_codebook:
                weights = torch.zeros(2 ** token.nbits)
                codebook = Codebook(torch.zeros(1, d), weights[1:], weights)
            for n_query_tokens in (1, 5, 20):
                counts = torch.arange(1, 15)
                last = page - counts * token.token_row_bytes(d)
                both_ends = torch.cat([torch.zeros_like(counts), last])
                query = torch.zeros(n_query_tokens, d)
                maxsim(query, middle, both_ends, counts.repeat(2), fmt, codebook=codebook)
    sizes = torch.arange(0, 600)
    crc32c_ranges(middle, torch.cat([torch.zeros_like(sizes), page - sizes]), sizes.repeat(2))
print("survived", flush=True)
shifted = (ctypes.c_uint8 * page).from_address(address + page + 1)
one_too_far = torch.frombuffer(shifted, dtype=torch.uint8)
crc32c_ranges(one_too_far, torch.tensor([0]), torch.tensor([page]))
print("the guard does not guard", flush=True)
"""


def test_records_at_both_ends_of_readable_memory(
    tmp_path: Path, open_forks: Callable[[str], Forks]
) -> None:
    """At last the program reads one byte too many on purpose, and dies of it, which shows that the
    guard works."""
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    code = open_forks("tests.doc_examples").run(text=PROGRAM, cwd=tmp_path, stdout=out, stderr=err)
    assert out.read_text() == "survived\n", err.read_text()
    assert code == -signal.SIGSEGV
