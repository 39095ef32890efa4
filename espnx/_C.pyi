"""The compiled extension, for type checkers: it is untyped, and what uses it wraps it in typed classes."""

from typing import Any

def __getattr__(name: str) -> Any: ...
