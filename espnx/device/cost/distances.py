"""`distances`: a device with processing elements takes a query with each cluster's command and
gives distances and ids back (in-storage distance calculation, chapter 3); of any other the clusters
pass its link. How an element is set up costs what the spec's bandwidths say: bubbles between
commands are a time model's work."""

from __future__ import annotations

import numpy as np

from ..clusters.commands import DistancesCommand
from ..model.spec import Accelerator
from ..vectors.interface import REPLY, Clusters
from .work import COMPUTE, Group, Leg, Work, groups_of


def distances(
    command: DistancesCommand, clusters: Clusters, accelerator: Accelerator | None
) -> Work:
    """Args:
    clusters: that are stored.
    accelerator: that measures; None: the host does.
    """
    wanted = np.asarray(command.clusters, dtype=np.int64)
    vectors = np.asarray(clusters.n_vectors)[wanted]
    # a page that clusters of the request share is read once
    flash = clusters.new_pages(wanted) * clusters.page_bytes
    flop = 3.0 * command.query.numel() * vectors  # a difference, its square, a sum
    legs, groups = list[Leg](), list[Group]()
    for begin, end in groups_of(flash):
        part = slice(begin, end)
        read_bytes, commands = int(flash[part].sum()), int(np.count_nonzero(vectors[part]))
        if accelerator is None:
            legs.append(Leg("flash_to_host", read_bytes, requests=commands))
        else:
            legs.append(Leg("host_to_device", command.query.nbytes * commands))
            legs.append(Leg("flash_read", read_bytes, (-1,), commands))
            legs.append(Leg(COMPUTE, read_bytes, (-1,), flop=float(flop[part].sum())))
            legs.append(Leg("device_to_host", int(vectors[part].sum()) * REPLY.itemsize, (-1,)))
        groups.append(Group(begin, end, len(legs) - 1))
    return Work(legs, groups)
