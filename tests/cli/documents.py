"""Documents that the command line writes, read strictly and held against the published schema."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

try:
    import jsonschema
except ImportError:  # an installation without the extra [dev]
    jsonschema = None

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schema.json"


def strict_json(text: str) -> dict[str, Any]:
    """JSON as the standard has it: no NaN, no Infinity; of a form that the schema names."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    check(document)
    return document


def check(document: dict[str, Any]) -> None:
    """Fails unless the schema has the document's command, and the document all that it says of
    it."""
    schema = json.loads(SCHEMA.read_text())
    name = (
        "error"
        if "error" in document
        else "bench"
        if document["command"].startswith("espnx ")
        else document["command"]
    )
    assert name in schema["$defs"], f"docs/schema.json knows no {name}"
    if jsonschema is not None:
        _validator("head").validate(document)
        _validator(name).validate(document)


@functools.cache
def _validator(name: str) -> Any:
    schema = json.loads(SCHEMA.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]})
