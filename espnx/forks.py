"""What a process may do that was forked: nothing that waits for a thread of its parent's, of which
it has none.

PyTorch and FAISS share work among threads by GNU OpenMP, and tokenizers by a pool of its own; in a
child both wait for the parent's threads, forever. So where a child begins to compute, its first
thread does so alone, as workers of PyTorch's DataLoader do. The program may raise the number again
(`torch.set_num_threads`) where its parent had computed nothing. Whatever computes calls
`compute_alone` first, and what belongs to one process `check_own`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from .errors import InvalidInputError

log = logging.getLogger(__name__)

# The process in which this module was imported, then a child of it that computes alone.
_process = os.getpid()


def compute_alone() -> None:
    """Has PyTorch, FAISS and tokenizers take one thread from here on in a forked child; does
    nothing anywhere else.

    It is the thread that called fork() which may not share its work: others, which the child has
    started, get new ones to share with.
    """
    global _process
    process = os.getpid()
    if process == _process or threading.current_thread() is not threading.main_thread():
        return
    _process = process
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)
    if "tokenizers" in sys.modules:
        # it looks whenever it encodes; of itself it is careful only where this is not set
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    log.info("process %d was forked, and computes on one thread", process)


def check_own(process: int, what: str, fix: str = "open it after fork()") -> None:
    """Raises InvalidInputError in a child of the process that made something, before it waits for
    what is not there.

    Args:
        process: that made it (`os.getpid`).
        what: it is, such as ``the index``.
    """
    own = os.getpid()
    if own != process:
        raise InvalidInputError(
            f"{what} belongs to the parent process",
            got=f"process {own}",
            expected=f"process {process}",
            fix=fix,
        )
    compute_alone()
