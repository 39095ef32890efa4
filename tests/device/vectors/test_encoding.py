"""`encode` on a plain device: the host's cores, which the result says."""

from __future__ import annotations

import pytest

from espnx import errors
from espnx.device.vectors.encoding import HOST_CORES, encode_on_host, forward_flop


def test_the_host_encodes() -> None:
    texts = ["a", "bb", "ccc"]
    done = encode_on_host(
        lambda given: [len(each) for each in given],
        texts,
        flop=forward_flop(parameters=22_000_000, tokens=6),
    )
    assert done.value == [1, 2, 3]
    assert (done.computed_on, done.kind, done.flop) == (HOST_CORES, "measured", 264e6)
    assert done.seconds >= 0


def test_what_the_encoder_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        encode_on_host(lambda texts: 1 // 0, [])


@pytest.mark.parametrize(("parameters", "tokens"), [(0, 1), (1, -1), (1.5, 1)])
def test_what_is_refused(parameters: int, tokens: int) -> None:
    with pytest.raises(errors.InvalidInputError):
        forward_flop(parameters=parameters, tokens=tokens)
    with pytest.raises(errors.InvalidInputError, match="flop of an encoding"):
        encode_on_host(len, [], flop=float("nan"))
