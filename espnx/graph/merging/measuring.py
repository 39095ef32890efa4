"""What searches of a changed graph find, measured again."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...storage import NativeEngine
from ..format import GraphFacts
from ..recall import stored_blocks, with_recall
from ..write import Progress


def measured_again(engine: NativeEngine, facts: GraphFacts, progress: Progress) -> GraphFacts:
    """A graph whose files are written, with curves of what searches of it find. Raises as
    `with_recall`."""
    found = with_recall(
        replace(facts, recall=(), filtered=()),
        lambda: stored_blocks(engine, facts),
        threads=torch.get_num_threads(),
        seed=int(facts.options.get("seed", 0)),
        progress=progress,
        of_codes=True,  # of codes in place of vectors nobody knows others
    )
    return replace(found, recall_ceiling=facts.recall_ceiling)


def measured_if(
    engine: NativeEngine, facts: GraphFacts, measure: str, progress: Progress
) -> GraphFacts:
    """Does so where curves say too little of what there is now, and as `GraphWriter.merge` was
    asked to."""
    if measure == "never" or (measure == "auto" and not facts.is_stale):
        return facts
    return measured_again(engine, facts, progress)
