"""The tasks' data: a file beside them, wherever they are run from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets


def sentences(**_: Any) -> Any:
    return datasets.load_dataset(
        "json", data_files={"test": str(Path(__file__).with_name("sentences.jsonl"))}
    )
