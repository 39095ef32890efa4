"""``espnx simulate --list``: what comes along, to be simulated and to be made of."""

from __future__ import annotations

from argparse import Namespace

from ...tables import render_table
from ..output import emit, json_document


def run_list(args: Namespace) -> int:
    from ...device.model.spec import load_preset as load_device
    from ...device.model.spec import presets as devices
    from ...simulate.cosmos import ELEMENTS
    from ...simulate.specs.load import WORDS, load_preset, presets
    from ...simulate.workloads import WORKLOADS

    found = [
        {"kind": word, "name": name, "title": load_preset(kind, name).title}
        for kind, word in WORDS.items()
        for name in presets(kind)
    ]
    found.append(
        {"kind": "system", "name": "cosmos", "title": f"COSMOS+, {', '.join(ELEMENTS)} elements"}
    )
    found += [
        {"kind": "workload", "name": each.name, "title": f"{each.title} (of cosmos)"}
        for each in WORKLOADS.values()
    ]
    found += [
        {"kind": "device", "name": name, "title": load_device(name).title} for name in devices()
    ]
    order = ["system", "workload", "program", "host", "gpu", "network", "device"]
    found.sort(key=lambda each: order.index(each["kind"]))
    table = render_table(["kind", "name", ""], [tuple(each.values()) for each in found])
    emit(args, table, json_document("simulate", specs=found))
    return 0
