"""All shows of all models. A file of its own: what is measured imports the options, which know
nothing of it."""

from __future__ import annotations

from ..harness.registry import Say
from ..harness.result import Row
from .answers import show_answers
from .first_token import show_first_token
from .options import Options, opened
from .quality import show_quality
from .shared import show_shared

_WAYS = {
    "ttft": show_first_token,
    "shared": show_shared,
    "answers": show_answers,
    "quality": show_quality,
}


def measure_shows(options: Options, say: Say) -> list[Row]:
    """The rows of every model and show."""
    rows = list[Row]()
    for name in options.models:
        with opened(name, options.path, say) as model:
            for show in options.shows:
                say(f"{show}, {model.name}")
                rows += _WAYS[show](options, model, say)
    return rows
