"""What ``espnx doctor`` looks at: one function per question, each isolated from the others'
failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

PASS, INFO, WARN, FAIL, NA = "PASS", "INFO", "WARN", "FAIL", "N-A"


@dataclass(frozen=True)
class Check:
    """The answer to one question.

    Attributes:
        status: PASS; INFO (worth knowing); WARN (works, slower or with less); FAIL (does not work);
            N-A (no such hardware here).
        name: short and stable: programs may look for it.
        says: the finding, one sentence.
        why: why it matters; empty when it is well.
        fix: what to type or change; empty when there is nothing to do.
        evidence: what was looked at, by name.
    """

    status: str
    name: str
    says: str
    why: str = ""
    fix: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


def run_checks(functions: Iterable[Callable[[], Check]]) -> list[Check]:
    """Runs each check; one that breaks is itself a finding and stops no other."""
    found = []
    for function in functions:
        try:
            found.append(function())
        except Exception as error:
            name = getattr(function, "__name__", str(function)).replace("_", "-")
            says = f"the check itself broke: {type(error).__name__}: {error}"
            found.append(
                Check(
                    FAIL,
                    name,
                    says,
                    "nothing is known about it",
                    "run `espnx env` and report both outputs",
                )
            )
    return found
