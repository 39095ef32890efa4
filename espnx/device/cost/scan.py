"""`scan`: a device that scans takes a command and gives the best records back, or every posting's
part of a score; of any other the lists pass its link, and the host scans."""

from __future__ import annotations

from ..model.spec import Accelerator
from ..postings.command import ScanCommand
from ..postings.interface import PostingLists
from .work import COMPUTE, Leg, Work


def scan(command: ScanCommand, lists: PostingLists, accelerator: Accelerator | None) -> Work:
    """Args:
    lists: that are stored.
    accelerator: that scans; None: the host does.
    """
    requests = len(command.lists.places)
    if accelerator is None:
        return Work([Leg("flash_to_host", command.flash_bytes, requests=requests)])
    return Work(
        [
            Leg("host_to_device", command.payload_bytes),
            Leg("flash_read", command.flash_bytes, (-1,), requests),
            Leg(COMPUTE, command.lists.size_bytes, (-1,), flop=command.flop),
            Leg("device_to_host", command.data_len, (-1,)),
        ]
    )
