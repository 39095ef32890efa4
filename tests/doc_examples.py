"""Examples of the documentation, each in a child of a process that has imported the libraries: the jobs of tests/forks.py."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import faiss
import transformers.models.llama.modeling_llama  # noqa: F401 - what most examples wait for

import espnx.cli.main
import espnx.integrations.transformers  # noqa: F401
from tests.forks import command_line, serve


def run(job: dict[str, Any]) -> int:
    """The Python block "text", or `espnx` with the words of "argv", in the folder "cwd"."""
    faiss.omp_set_num_threads(1)
    os.chdir(job["cwd"])
    if "argv" in job:
        return command_line(job)
    with open(job["stdout"], "w") as sys.stdout, open(job["stderr"], "w") as sys.stderr:
        try:
            exec(compile(job["text"], "<example>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    serve(run)
