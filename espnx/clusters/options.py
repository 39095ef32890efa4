"""Options of a build."""

from __future__ import annotations

PACKINGS = ("order", "best-fit", "co-access")
