"""What an accelerator of HILOS's kind attends with, from its clock, its units and its memory: the
estimate that section 5.1 of HILOS makes of cycle counts, made of what its section 4.4 says.

A file of its own: machines take the rates that a spec states; this says how far they explain
themselves.
"""

from __future__ import annotations

from ...device.model.spec import DeviceSpec
from ...errors import InvalidInputError
from .shape import HALF_BYTES

#: Scores are kept in single precision (HILOS section 5.4).
_SCORE_BYTES = 4
#: Exponentials that are taken at a time, the unrolling of HILOS section 5.4.
EXPONENTIALS = 2


def flops_per_s(spec: DeviceSpec, group: int) -> float:
    """The rate of a kernel in which so many query heads share a pass over K and V.

    A block of K and one of V come from the device's memory once. The scores of a whole sequence do
    not fit on the chip, since what is on it does not grow with the sequence, and softmax needs
    them twice: they go to that memory and come back. Units work at once (the dataflow of section
    5.4), so the slowest of memory, products and exponentials gives the pace.

    Raises:
        InvalidInputError: no such group; a device without clock, units or memory bandwidth.
    """
    parts = spec.accelerator
    if parts is None or not (parts.clock and parts.units and parts.block_tokens and parts.head_dim):
        raise InvalidInputError(
            f"an estimate of {spec.name}'s kernel",
            got="an accelerator without clock, units, block or head size",
            expected="all of them",
        )
    if spec.memory.bandwidth is None:
        raise InvalidInputError(f"an estimate of {spec.name}'s kernel", got="no memory bandwidth")
    if group < 1:
        raise InvalidInputError("query heads that share a pass", got=group, expected="1 or more")
    tokens, dim = parts.block_tokens.value, parts.head_dim.value
    rows_bytes = 2 * tokens * dim * HALF_BYTES
    scores_bytes = 2 * group * tokens * _SCORE_BYTES
    memory_s = (rows_bytes + scores_bytes) / spec.memory.bandwidth.value
    # each query head has units of its own, for K and for V
    products_s = tokens * dim / parts.units.value / parts.clock.value
    exponentials_s = group * tokens / EXPONENTIALS / parts.clock.value
    flops = 4 * group * tokens * dim
    return flops / max(memory_s, products_s, exponentials_s)
