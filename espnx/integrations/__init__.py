"""What joins espnx to other packages, one file each. Nothing here is imported until it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from espnx.errors import InvalidInputError

if TYPE_CHECKING:
    from espnx.retrieval.encoder import Encoder


def load_encoder(spec: str, *, device: str = "cpu", dtype: str = "auto") -> Encoder:
    """An encoder by its description, as on the command line.

    Args:
        spec: ``"minilm"`` (:class:`espnx.integrations.minilm.MiniLM`), or the path of a Hugging Face encoder's folder
            (:class:`espnx.integrations.huggingface.HuggingFaceEncoder`).
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of the forward pass: ``"auto"``, ``"fp32"`` or ``"bf16"``.

    Raises:
        InvalidInputError: neither a known name nor a folder.
        MissingDependencyError: a package that the encoder needs is not installed.
    """
    if spec == "minilm":
        from espnx.integrations.minilm import MiniLM

        return MiniLM(device=device, dtype=dtype)
    if Path(spec).is_dir():
        from espnx.integrations.huggingface import HuggingFaceEncoder

        return HuggingFaceEncoder(spec, device=device, dtype=dtype)
    raise InvalidInputError(
        "encoder",
        got=repr(spec),
        expected='"minilm" or the folder of a Hugging Face encoder',
        fix="give the folder that holds config.json, or a path that begins with ./ if it is a folder named like this",
    )
