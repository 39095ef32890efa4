"""Ways to compute some tokens of passages anew: what may be asked for (shared by all that composes
prompts)."""

from __future__ import annotations

from ... import errors


def check_lossy(repair: object, blend: object) -> None:
    """Raises InvalidInputError.

    Args:
        repair: tokens of each passage, its first ones; None: none.
        blend: a share of all passages' tokens; None: none.
    """
    if repair is not None and blend is not None:
        raise errors.InvalidInputError(
            "compose(repair=, blend=)", got=f"{repair} and {blend}", expected="one of them"
        )
    is_whole = isinstance(repair, int) and not isinstance(repair, bool) and repair >= 0
    if repair is not None and not is_whole:
        raise errors.InvalidInputError(
            "repair", got=repr(repair), expected="0 or more tokens of each passage"
        )
    is_share = isinstance(blend, float | int) and not isinstance(blend, bool) and 0 <= blend <= 1
    if blend is not None and not is_share:
        raise errors.InvalidInputError(
            "blend", got=repr(blend), expected="a share of the passages' tokens, 0 to 1"
        )
