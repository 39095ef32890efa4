"""Compiles the Triton kernel of attention for sm_80 and sm_90 ahead of time, which needs no GPU,
and looks at what came out."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

from tests.ops.attention.variants import (
    CAPABILITIES,
    TABLE,
    TESTED,
    VARIANTS,
    Variant,
    compiled,
    resources,
    row_key,
)

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024}
STORED = {
    tuple(row[name] for name in ("sm", *Variant._fields)): row
    for row in json.loads(TABLE.read_text())["rows"]
}


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("variant", TESTED, ids=str)
def test_compiled_ahead_of_time(capability: int, variant: Variant) -> None:
    kernel = compiled(variant, capability)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert kernel.metadata.shared <= SHARED_BYTES_MAX[capability]
    assert "mma.sync" in kernel.asm["ptx"] or "wgmma" in kernel.asm["ptx"]
    if variant.format == "fp32":
        # Three products of parts, or it would be rounded to TF32.
        assert kernel.asm["ptx"].count(".tf32.tf32.f32") % 3 == 0
    found, stored = resources(kernel), STORED[capability, *variant]
    assert found["stack_bytes"] <= stored["stack_bytes"], "spills more than it did; see variants.py"
    assert found["shared_bytes"] <= stored["shared_bytes"]


def test_the_table_has_every_variant_and_none_lives_on_spills() -> None:
    assert list(STORED) == [
        tuple(row_key(variant, capability).values())
        for variant in VARIANTS
        for capability in CAPABILITIES
    ]
    assert all(row["stack_bytes"] <= 1280 for row in STORED.values())
