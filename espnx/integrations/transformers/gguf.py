"""Models in GGUF files, as ordinary transformers models: dequantised, so that they can be enabled,
kept, saved and streamed.

transformers reads the file, with the package gguf. What it makes of it here says nothing of the
file any more: `save_pretrained` writes a folder that everything else takes, in the time of one
load.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ... import errors
from ...forks import compute_alone
from ...suggestions import suggests_keywords

_NEEDED = ("gguf", "accelerate")  # transformers asks for both


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder without a ``config.json``;
    None: it is no GGUF file, and holds none.

    Raises InvalidInputError where a folder holds several.
    """
    where = Path(path)
    if where.suffix == ".gguf" and where.is_file():
        return where
    if not where.is_dir() or (where / "config.json").exists():
        return None
    found = sorted(where.glob("*.gguf"))
    if len(found) > 1:
        raise errors.InvalidInputError(
            f"model in {where}",
            got=", ".join(file.name for file in found),
            expected="one GGUF file",
            fix="name the file that you mean",
        )
    return found[0] if found else None


@suggests_keywords
def load_gguf(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model and its tokenizer from a GGUF file.

    Args:
        path: the file, or a folder that holds one.
        dtype: of the weights. Quantised ones are what the file says in float32, and rounded in
            anything less.

    Returns:
        (model, tokenizer) of transformers; the model on the CPU, in evaluation mode, without a
        trace of quantisation.

    Raises:
        InvalidInputError: no GGUF file is there, or several are.
        MissingDependencyError: gguf or accelerate is not installed.
        FormatError: transformers cannot read the file: it is damaged, of an architecture that it
            does not know, or not a whole model.
    """
    compute_alone()
    file = find_gguf(path)
    if file is None:
        raise errors.InvalidInputError(
            f"model {os.fspath(path)}",
            got="no GGUF file",
            expected="one, or a folder that holds one",
        )
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise errors.MissingDependencyError(
            "a model in a GGUF file",
            got=f"no {', '.join(missing)}",
            fix="pip install 'espnx[gguf]'",
        )
    where = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            **where,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        # its readers check little: a damaged file raises whatever it provokes, in tokenizers plain
        # exceptions
        line = next(iter(str(error).splitlines()), "")
        raise errors.FormatError(
            "cannot read a model",
            path=file,
            got=f"{type(error).__name__}: {line}",
            expected="a GGUF file that transformers knows",
        ) from error
    # transformers would draw them at random, with a warning
    if absent := sorted(report["missing_keys"]):
        raise errors.FormatError(
            "not a whole model",
            path=file,
            got=f"no {', '.join(absent[:3])}",
            expected="all weights",
        )
    return model.eval(), tokenizer
