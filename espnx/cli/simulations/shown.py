"""``espnx simulate --list`` and ``--validation``: what comes along, and how far to believe it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ...tables import render_table
from ..output import emit, json_document

US = 1e6


def run_validation(args: Namespace) -> int:
    from ...simulate import validation
    from ...simulate.decoding import validation as decoding
    from ...simulate.retrieval import validation as retrieval

    found, services = validation.validate(args.draws), retrieval.validate(args.draws)
    rows = [*found.rows, *decoding.validate(args.draws), *services.rows]
    document = json_document(
        "simulate",
        kind="modelled",
        validation=[_row(row) for row in rows],
        kernels=_kernels(),
        orders=decoding.orders(),
        fitted={**found.fitted, **services.fitted},
        fitted_on={**found.fitted_on, **services.fitted_on},
        check=dict(found.check),
        checks=[dict(each) for each in services.checks],
    )
    text = _validation_text(document, rows)
    emit(args, f"{text}\n\n{_orders_text(document['orders'])}", document)
    return 0


def _kernels() -> list[dict[str, Any]]:
    """A table of the SmartSSD's kernel: the estimate beside what its spec states."""
    from ...device.model.spec import load_preset
    from ...simulate.decoding.kernel import flops_per_s

    drive = load_preset("smartssd")
    rates = {} if drive.accelerator is None else drive.accelerator.rates
    return [
        {
            "query_heads": heads,
            "estimated_flops_per_s": flops_per_s(drive, heads),
            "stated_flops_per_s": rate.value,
        }
        for heads, rate in rates.items()
    ]


def _row(row: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(row)


def _validation_text(document: dict[str, Any], predicted: Sequence[object]) -> str:
    rows = [
        (row["id"], *(f"{row[name]:.2f}" for name in ("value", "low", "high")))
        if "value" in row
        else (row["id"], row["not_predicted"], None, None)
        for row in map(_row, predicted)
    ]
    table = render_table(["id", "value", "low", "high"], rows, right=["value", "low", "high"])
    fitted = ", ".join(f"{name} {value * US:.4g} us" for name, value in document["fitted"].items())
    on = ", ".join(f"{name} = {value:g}" for name, value in document["fitted_on"].items())
    kernels = ", ".join(
        f"{each['estimated_flops_per_s'] / 1e9:.1f} for {each['stated_flops_per_s'] / 1e9:.1f}"
        for each in document["kernels"]
    )
    checks = "\n".join(
        f"not fitted, beside it: {each['id']}: measured {each['measured']:g}, "
        f"predicted {each['predicted']:.4g}"
        for each in (document["check"], *document["checks"])
    )
    return (
        f"{table}\n\nfitted: {fitted}, on {on}\n{checks}\n"
        f"kernels of the SmartSSD, GFLOPS estimated for those stated: {kernels}"
    )


def _orders_text(orders: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            each["model"],
            f"{each['context']:,}",
            " > ".join(f"{name} {rate:.3g}" for name, rate in each["tokens_per_s"].items()),
        )
        for each in orders
    ]
    return render_table(["model", "context", "tokens/s"], rows, right=["context"])


def run_list(args: Namespace) -> int:
    from ...device.model.spec import load_preset as load_device
    from ...device.model.spec import presets as devices
    from ...simulate.cosmos import ELEMENTS
    from ...simulate.specs.load import WORDS, load_preset, presets

    found = [
        {"kind": word, "name": name, "title": load_preset(kind, name).title}
        for kind, word in WORDS.items()
        for name in presets(kind)
    ]
    found.append(
        {"kind": "system", "name": "cosmos", "title": f"COSMOS+, {', '.join(ELEMENTS)} elements"}
    )
    found += [
        {"kind": "device", "name": name, "title": load_device(name).title} for name in devices()
    ]
    order = ["system", "workload", "clusters", "service", "retriever", "searcher", "walk"]
    order += ["generation", "program", "host", "gpu", "network", "device"]
    found.sort(key=lambda each: order.index(each["kind"]))
    table = render_table(["kind", "name", ""], [tuple(each.values()) for each in found])
    emit(args, table, json_document("simulate", specs=found))
    return 0
