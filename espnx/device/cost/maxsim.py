"""`maxsim`: a device whose accelerator scores records takes queries and gives scores back; of any
other the records pass its link."""

from __future__ import annotations

import numpy as np

from ..model.spec import Accelerator
from ..pages import page_reads
from ..record_layout import RecordLayout
from ..records.commands import MaxsimCommand
from .work import COMPUTE, Group, Leg, Work, groups_of

_SCORE_BYTES = 8  # a float32, and the record's number


def maxsim(command: MaxsimCommand, layout: RecordLayout, accelerator: Accelerator | None) -> Work:
    """Args:
    layout: of the records.
    accelerator: that scores; None: the host does.
    """
    numbers, pairs, queries = (
        np.ascontiguousarray(command.numbers, dtype=np.int64),
        command.pairs,
        command.queries,
    )
    file, offset_bytes, size_bytes = (each.numpy() for each in layout.locate(numbers))
    reads, moved_bytes = page_reads(file, offset_bytes, size_bytes, command.gap_bytes)
    wanted = (
        np.ones(len(numbers), np.int64)
        if pairs is None
        else np.bincount(pairs.item, minlength=len(numbers))
    )
    tokens = sum(len(each.tokens) for each in queries) / max(len(queries), 1)
    flop = 2.0 * layout.schema.dim * tokens * layout.n_tokens[numbers] * wanted
    legs, groups = list[Leg](), list[Group]()
    if accelerator is not None:
        legs.append(
            Leg("host_to_device", sum(each.tokens.nbytes + each.cls.nbytes for each in queries))
        )
    for begin, end in groups_of(moved_bytes):
        part = slice(begin, end)
        read_bytes, requests = int(moved_bytes[part].sum()), int(reads[part].sum())
        if accelerator is None:
            legs.append(Leg("flash_to_host", read_bytes, requests=requests))
        else:
            legs.append(Leg("flash_read", read_bytes, (0,), requests))
            legs.append(Leg(COMPUTE, read_bytes, (-1,), flop=float(flop[part].sum())))
            legs.append(Leg("device_to_host", int(wanted[part].sum()) * _SCORE_BYTES, (-1,)))
        groups.append(Group(begin, end, len(legs) - 1))
    return Work(legs, groups)
