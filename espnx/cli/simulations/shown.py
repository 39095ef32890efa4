"""``espnx simulate --list`` and ``--validation``: what comes along, and how far to believe it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...tables import render_table
from ..output import emit, json_document

if TYPE_CHECKING:
    from ...simulate.graphs import validation as graphs

US, MS = 1e6, 1e3


def run_validation(args: Namespace) -> int:
    from ...simulate import validation
    from ...simulate.decoding import validation as decoding
    from ...simulate.graphs import validation as graphs
    from ...simulate.predictions import DRAWS
    from ...simulate.retrieval import validation as retrieval

    draws = DRAWS if args.draws is None else args.draws
    found, services = validation.validate(draws), retrieval.validate(draws)
    beside = _beside(graphs.show(draws))
    rows = [*found.rows, *decoding.validate(draws), *services.rows]
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
        aisaq=beside,
    )
    text = _validation_text(document, rows)
    parts = [text, _orders_text(document["orders"]), _beside_text(beside)]
    emit(args, "\n\n".join(parts), document)
    return 0


def _beside(shown: graphs.Shown) -> dict[str, Any]:
    """What is shown beside a publication and not scored, as the document has it."""
    from dataclasses import asdict

    return {
        "scored": False,
        "published": asdict(shown.published),
        "rows": [asdict(each) for each in shown.rows],
        "blind_over": [
            {"list_size": list_size, "value": value}
            for list_size, value in shown.blind_over.items()
        ],
        "figures": {
            name: asdict(each) | {"value": each.middle} for name, each in shown.figures.items()
        },
    }


def _beside_text(beside: dict[str, Any]) -> str:
    published, rows = beside["published"], []
    for row in beside["rows"]:
        cells = [f"{row['list_size']}"]
        for name, factor in (("p95_s", MS), ("queries_per_s", 1.0)):
            value, low, high = (factor * row[name][each] for each in ("value", "low", "high"))
            cells += [f"{value:.3g}", f"{low:.3g} to {high:.3g}"]
        rows.append(cells)
    headers = ["AiSAQ, list", "P95 ms", "range", "queries/s", "range "]
    blind = ", ".join(f"{each['value']:.2f} ({each['list_size']})" for each in beside["blind_over"])
    return (
        f"{render_table(headers, rows, right=headers)}\n\n"
        f"published, not scored: P95 {published['p95_s'] * MS:g} ms, "
        f"{published['queries_per_s']:g} queries/s, at a list that is not\n"
        f"blind shards over clusters, P95: published {published['blind_over']:g}, "
        f"predicted {blind}"
    )


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
    order += ["server", "collection", "generation", "program", "host", "gpu", "network", "device"]
    found.sort(key=lambda each: order.index(each["kind"]))
    table = render_table(["kind", "name", ""], [tuple(each.values()) for each in found])
    emit(args, table, json_document("simulate", specs=found))
    return 0
