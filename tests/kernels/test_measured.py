"""What ran on a GPU, beside what machine code allows."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

from tests.kernels.bounds import bounds
from tests.kernels.table import RAN, ran, stored


@pytest.mark.parametrize("variant", RAN)
def test_nothing_is_faster_than_its_bound(variant: str) -> None:
    (bound,) = (
        bounds(row).rate for row in stored() if (row["variant"], row["sm"]) == (variant, 90)
    )
    rates = [row["metrics"]["bytes_per_s"] for row in ran(variant)]
    assert rates
    assert max(rates) < bound
