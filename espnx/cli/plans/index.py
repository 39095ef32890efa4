"""``espnx plan --documents``: what an index needs on SSD and in memory, and what its build will
wait for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..host import usable_memory_bytes
from ..index_options import FORMATS, POOLINGS, first_stages_of
from ..output import emit, json_document

if TYPE_CHECKING:
    from ...retrieval.build.planning import IndexPlan

FITS = "it fits in memory, you need none of this"
_TOKENS, _DIM = 80, 128
_OPTIONS = ("format", "coarse", "pca", "pooling", "first_stage_code", "nlist")


def configure_index(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("an index", "options as of `espnx index build`").add_argument
    add("--documents", type=int, metavar="N", help="how many")
    add("--tokens", type=int, metavar="T", help="of each document (default: 80)")
    add(
        "--dim",
        type=int,
        metavar="D",
        help="of the encoder's token vectors (default: 128); of a graph's vectors",
    )
    add("--d-cls", type=int, default=0, metavar="D", help="of its CLS vectors (default: none)")
    add(
        "--encoder",
        metavar="E",
        help="instead of both: minilm, or the folder of one; with --storage it is measured too",
    )
    add(
        "--encoder-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="what it computes in (default: %(default)s)",
    )
    add("--format", default="fp16", choices=FORMATS, metavar="F", help="default: %(default)s")
    add("--coarse", choices=FORMATS[3:], metavar="F")
    add("--pca", type=int, metavar="DIM")
    add("--pooling", choices=POOLINGS, metavar="P")
    add("--first-stage-code", default="sq8", metavar="CODE", help="default: %(default)s")
    add("--nlist", type=int, metavar="N")
    add("--first-stages", default="ivf", metavar="S", help="ivf or clusters (default: %(default)s)")
    add(
        "--stage-option",
        action="append",
        default=[],
        metavar="S.OPTION=VALUE",
        help="an option of clusters; may be repeated",
    )


def run_index(args: Namespace) -> int:
    from dataclasses import asdict

    if args.dim is not None and args.encoder is not None:
        raise InvalidInputError(
            "plan --documents",
            got="--dim and --encoder",
            expected="one of them: an encoder has its own dimensions",
        )
    if args.storage is not None:
        check_given_directory(args.storage)
    assumed = _assumed(args)
    from ...retrieval.build.options import BuildOptions
    from ...retrieval.build.planning import plan_index

    encoder = None
    if args.encoder is not None:
        from ... import load_encoder

        encoder = load_encoder(args.encoder, dtype=args.encoder_dtype)
    dims = (args.d_cls, args.dim) if encoder is None else (encoder.d_cls, encoder.dim)
    options = {name: getattr(args, name) for name in _OPTIONS}
    stages = _stages(args)
    plan = plan_index(
        args.documents,
        args.tokens,
        dims,
        BuildOptions.given(**options, first_stages=stages),
        storage=args.storage,
        encoder=encoder,
    )
    usable = usable_memory_bytes()
    fit = {"needed_bytes": plan.disk["total_bytes"], "usable_bytes": usable}
    fit["fits"] = usable is not None and plan.disk["total_bytes"] <= usable
    inputs = {
        "documents": args.documents,
        "tokens": args.tokens,
        "d_cls": dims[0],
        "dim": dims[1],
        "storage": args.storage,
        "first_stages": stages,
        **options,
    }
    kinds = {"sizes": "computed", "speeds": "measured", "seconds": "modelled"}
    rows = [*_sizes(plan, inputs), *assumed.values(), _says(fit), *_times(plan)]
    emit(
        args,
        render_table(("", "", ""), rows),
        json_document(
            "plan", inputs=inputs, assumed=list(assumed), kinds=kinds, fit=fit, **asdict(plan)
        ),
    )
    return 0


def _stages(args: Namespace) -> list[str] | dict[str, dict[str, Any]]:
    """The first stage that is planned. Raises InvalidInputError for one whose size nobody knows
    before."""
    stages = first_stages_of(args)
    if list(stages) not in (["ivf"], ["clusters"]):
        raise InvalidInputError(
            "plan --documents --first-stages",
            got=args.first_stages,
            expected="ivf or clusters",
            fix="of a graph: plan --vectors N --dim D; of words: plan --postings N",
        )
    return stages


def _assumed(args: Namespace) -> dict[str, tuple[str, str, str]]:
    """What nobody has said is that of ColBERT on short passages: set in `args`, and a row for
    each."""
    found = {}
    if args.tokens is None:
        args.tokens = _TOKENS
        found["tokens"] = (
            "  assumed",
            f"{_TOKENS} tokens",
            "of a document: say yours with --tokens",
        )
    if args.dim is None and args.encoder is None:
        args.dim = _DIM
        found["dim"] = (
            "  assumed",
            f"{_DIM} dimensions",
            "of a token's vector: say yours with --dim or --encoder",
        )
    return found


def _sizes(plan: IndexPlan, inputs: dict[str, Any]) -> list[tuple[str, str, str]]:
    disk, memory, documents = plan.disk, plan.memory, inputs["documents"]
    shape = f"x {inputs['tokens']} tokens x {inputs['dim']} dimensions in {inputs['format']}"
    kept = "" if inputs["pca"] is None else f", projected to {inputs['pca']}"
    rows = [
        ("documents", f"{documents:,}", shape + kept),
        ("on SSD", format_size(disk["total_bytes"]), "beside texts and ids"),
        (
            "  records",
            format_size(disk["full_records_bytes"]),
            f"{disk['full_records_bytes'] / documents:,.0f} bytes a document",
        ),
    ]
    if "coarse_records_bytes" in disk:
        each = f"{disk['coarse_records_bytes'] / documents:,.0f} bytes a document, of the cascade"
        rows.append(("  coarse records", format_size(disk["coarse_records_bytes"]), each))
    kind = f"inverted lists, {inputs['first_stage_code']}"
    if list(inputs["first_stages"]) != ["ivf"]:
        kind = "lists on SSD, heads in memory or in a graph"
    return [
        *rows,
        ("  first stage", format_size(disk["first_stage_bytes"]), kind),
        (
            "  while it is built",
            format_size(disk["spool_bytes"]),
            "more: what the encoder made, until it is in order",
        ),
        (
            "in memory",
            format_size(memory["total_bytes"]),
            f"{memory['total_bytes'] / documents:,.1f} bytes a document, when it is open",
        ),
        (
            "  metadata",
            format_size(memory["metadata_bytes"]),
            f"{memory['metadata_bytes'] / documents:,.3f} bytes a document",
        ),
        (
            "  first stage",
            format_size(memory["first_stage_bytes"]),
            f"{memory['first_stage_bytes'] / documents:,.1f} bytes a document",
        ),
    ]


def _says(fit: dict[str, Any]) -> tuple[str, str, str]:
    free = "unknown" if fit["usable_bytes"] is None else format_size(fit["usable_bytes"])
    verdict = FITS if fit["fits"] else "it does not fit in memory"
    return (
        "all in memory",
        format_size(fit["needed_bytes"]),
        f"beside the encoder; free here: {free}; {verdict}",
    )


def _times(plan: IndexPlan) -> list[tuple[str, str, str]]:
    build, speeds, seconds = plan.build, plan.speeds, plan.seconds
    if not seconds:
        return [
            ("build", "n/a", "needs --storage DIR: nothing was measured"),
            (
                "  spool",
                "n/a",
                f"{format_size(build['spool_written_bytes'])} / bandwidth, and the encoder",
            ),
            ("  arrange", "n/a", f"{build['arrange_operations']:.4g} operations / rate"),
            (
                "  write",
                "n/a",
                (
                    f"{format_size(build['write_read_bytes'] + build['write_written_bytes'])} / "
                    "bandwidth"
                ),
            ),
        ]
    rates = (
        f"{format_size(speeds['read_bytes_per_s'])}/s read, "
        f"{format_size(speeds['written_bytes_per_s'])}/s written (measured)"
    )
    encoder = "the encoder left out: name it with --encoder"
    if "encoded_documents_per_s" in speeds:
        encoder = f"{speeds['encoded_documents_per_s']:,.1f} documents/s are encoded (measured)"
    return [
        ("build", f"{sum(seconds.values()):,.4g} s", f"at least (modelled); disk: {rates}"),
        (
            "  spool",
            f"{seconds['spool']:,.4g} s",
            f"{format_size(build['spool_written_bytes'])} written; {encoder}",
        ),
        (
            "  arrange",
            f"{seconds['arrange']:,.4g} s",
            f"{build['arrange_operations']:.4g} operations, and vectors that are read",
        ),
        (
            "  write",
            f"{seconds['write']:,.4g} s",
            f"{format_size(build['write_written_bytes'])} written, as much read",
        ),
    ]
