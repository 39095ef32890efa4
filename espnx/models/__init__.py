"""Models that come with the package: one, small, trained for it (docs/demo-model.md)."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FileMissingError

#: What a command line takes for its folder.
DEMO = "demo"
_FOLDER = Path(__file__).resolve().parent / DEMO


def demo_model() -> Path:
    """The folder of a small Llama that reads documentation of Python and recalls a line such as
    ``KEY garden: silver river``; 13 MB, with its tokenizer. For trying things out, where any folder
    of a Hugging Face model would do; nothing is downloaded.

    Raises:
        FileMissingError: this installation was made without it.
    """
    if not (_FOLDER / "config.json").is_file():
        raise FileMissingError(
            "the model of the demo",
            path=str(_FOLDER),
            fix="install espnx again, from a wheel or a whole clone",
        )
    return _FOLDER


def model_folder(name: str | os.PathLike[str]) -> str:
    """The path of a model as a command line names it: ``demo`` is `demo_model`, anything else a
    path as it stands (so ``./demo`` is)."""
    return str(demo_model()) if name == DEMO else os.fspath(name)
