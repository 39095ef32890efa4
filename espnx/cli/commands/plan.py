"""``espnx plan``: what a model needs, by tier, and what its decoding will wait for, before anything
runs."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...models import model_folder
from ...sizes import format_size, parse_size
from ...suggestions import downloading
from ...tables import render_table
from ..draft_options import add_draft_options, check_draft
from ..host import usable_memory_bytes
from ..output import add_json_option, emit, json_document
from ..plans.graph import configure_graph, run_graph
from ..plans.index import FITS, configure_index, run_index
from ..plans.postings import configure_postings, run_postings
from ..plans.rag import configure_rag, run_rag

DESCRIPTION = """Of a model (--model): sizes come from the configuration and the headers of the
weights; nothing of it is loaded. With --storage the disk is measured (a temporary file of at most
256 MiB, read past the page cache), and memory and matrix products for a moment each; the time of a
decoding step is modelled from that as a lower bound: every byte and operation once, all resources
at work at a time. So is the time to compute a prompt anew, and with it the bandwidth from which on
reading its kept K and V is sooner (break-even).

Of an index (--documents; without --tokens and --dim of 80 tokens x 128 dimensions, and it says so):
bytes on SSD and in memory, and with --storage what a build takes at least.

Of a graph of vectors (--vectors, --dim): bytes on SSD and in memory by where its codes lie, of a
build, and with prices the cost.

Of posting lists (--postings): bytes on SSD and in memory.

Of K and V of passages (rag, with --model and --passages): bytes, which share of requests finds its
passage kept, and the bandwidth from which on reading is sooner than computing."""
DTYPES = ("float32", "float16", "bfloat16")


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "what", nargs="?", choices=("rag",), help="rag: passages kept for a model's answers"
    )
    parser.add_argument(
        "--storage",
        metavar="DIR",
        help="where K and V, or the index, will lie; it is measured (default: no times)",
    )
    add_json_option(parser)
    add = parser.add_argument_group("a model").add_argument
    add("--model", metavar="DIR", help="a Hugging Face model's folder, or a config.json alone")
    add("--batch", type=int, default=1, metavar="B", help="sequences (default: %(default)s)")
    add("--context", type=int, metavar="S", help="tokens of each prompt")
    add(
        "--new",
        type=int,
        default=1,
        metavar="N",
        help="tokens to generate for each (default: %(default)s)",
    )
    add(
        "--memory", metavar="SIZE", help="for weights, such as 8GiB (default: as much as they take)"
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights, K and V (default: as stored, else as the config says)",
    )
    add_draft_options(add)
    configure_index(parser)
    configure_graph(parser)
    configure_postings(parser)
    configure_rag(parser)


def run(args: Namespace) -> int:
    runs = {
        "--model": run_model,
        "--documents": run_index,
        "--vectors": run_graph,
        "--postings": run_postings,
    }
    given = [name for name in runs if getattr(args, name[2:]) is not None]
    if len(given) != 1:
        fix = (
            "one at a time"
            if given
            else "--model DIR --context S, --documents N, --vectors N --dim D, or --postings N"
        )
        raise InvalidInputError(
            "plan",
            got=" and ".join(given) or "nothing to plan",
            expected=f"one of {', '.join(runs)}",
            fix=fix,
        )
    if (args.what is None) != (args.passages is None) or (args.what and given != ["--model"]):
        raise InvalidInputError(
            "plan rag",
            got=f"{args.what or 'no rag'}, --passages {args.passages}, {given[0]}",
            expected="rag, --model and --passages together",
            fix="espnx plan rag --model DIR --passages N",
        )
    return runs[given[0]](args)


def run_model(args: Namespace) -> int:
    args.model = model_folder(args.model)
    if not os.path.exists(args.model):
        raise InvalidInputError(
            f"plan --model {args.model}",
            got="no such folder",
            expected="a Hugging Face model's folder, or its config.json",
            fix=downloading(args.model),
        )
    if args.what == "rag":
        if args.storage is not None:
            check_given_directory(args.storage)
        return run_rag(args)
    if args.context is None:
        raise InvalidInputError(
            "plan --model",
            got="no --context",
            expected="the tokens of each prompt",
            fix="--context 32000, say",
        )
    check_draft(args)
    if args.storage is not None:
        check_given_directory(args.storage)
    from dataclasses import asdict

    try:
        import torch

        from ...integrations.streamed.plan import plan_model
    except ImportError as error:
        if error.name != "transformers":
            raise
        from ...errors import MissingDependencyError

        raise MissingDependencyError(
            "plan", got=str(error), expected="transformers", fix="pip install 'espnx[models]'"
        ) from error
    memory = None if args.memory is None else parse_size(args.memory)
    if memory == 0:
        raise InvalidInputError("--memory", got=0, expected="a size above 0")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    plan = plan_model(
        args.model,
        batch=args.batch,
        context=args.context,
        new=args.new,
        memory_bytes=memory,
        storage=args.storage,
        dtype=dtype,
        draft=None if args.draft == "none" else args.draft,
        draft_memory=args.draft_memory,
        draft_read_ahead_bytes=args.draft_read_ahead,
    )
    words = asdict(plan)
    fit = _fit(words)
    rows = [
        *_sizes(words, args),
        _says(words, fit),
        *_times(words, plan.bound_by, args.batch),
        *_drafts(words["draft"]),
        *_resumed(words),
    ]
    inputs = {
        "path": args.model,
        "batch": args.batch,
        "context": args.context,
        "new": args.new,
        "memory_bytes": memory,
        "draft": args.draft,
        "draft_memory": args.draft_memory,
        "draft_read_ahead_bytes": args.draft_read_ahead,
    }
    kinds = {"sizes": "computed", "speeds": "measured", "seconds": "modelled"}
    document = json_document(
        "plan",
        inputs=inputs | {"storage": args.storage},
        kinds=kinds,
        bound_by=plan.bound_by,
        fit=fit,
        **words,
    )
    emit(args, render_table(("", "", ""), rows), document)
    return 0


def _sizes(plan: dict[str, Any], args: Namespace) -> list[tuple[str, str, str]]:
    model, weights, kv = plan["model"], plan["weights"], plan["kv"]
    layers = f"{weights['layers_resident']} of {model['layers']} layers"
    tokens = f"{args.batch} x {args.context + args.new:,} tokens"
    rows = [
        ("model", model["class"], f"{model['parameters']:,} parameters, {model['dtype']}"),
        (
            "weights",
            format_size(weights["total_bytes"]),
            (
                f"from {model['sizes_from']}; the least memory: "
                f"{format_size(weights['least_memory_bytes'])}"
            ),
        ),
        ("  in memory", format_size(weights["resident_bytes"]), f"{layers}, and all outside them"),
        (
            "  streamed",
            format_size(weights["streamed_bytes"]),
            f"{weights['layers_streamed']} layers, read in each forward pass",
        ),
        ("  buffers", format_size(weights["buffer_bytes"]), "that they are read into"),
        (
            "K and V",
            format_size(kv["total_bytes"]),
            (
                f"{tokens}, {format_size(kv['bytes_per_token'])} a token in {kv['layers_on_ssd']} "
                "layers"
            ),
        ),
        ("  on SSD", format_size(kv["ssd_bytes"]), "whole blocks"),
        (
            "  in memory",
            format_size(kv["memory_tail_bytes"] + kv["memory_checksum_bytes"]),
            "newest tokens and checksums, at most",
        ),
        ("  buffers", format_size(kv["memory_buffer_bytes"]), "read ahead, for each directory"),
    ]
    if kv["memory_layers_bytes"]:
        layers = (
            f"{kv['layers_with_window']} sliding layers, {kv['layers_with_rows_and_state']} with a "
            "state beside their rows"
        )
        rows.append(
            ("  windows and others", format_size(kv["memory_layers_bytes"]), f"{layers}: in memory")
        )
    if kv["layers_of_other_kinds"]:
        rows.append(
            (
                "  states",
                "n/a",
                f"{kv['layers_of_other_kinds']} layers that keep no rows for each token",
            )
        )
    ratio = kv["x_to_kv_ratio"]
    says = "X would take less than K and V" if ratio < 1 else "X would not save anything"
    rows.append(
        (
            "X instead",
            format_size(kv["x_ssd_bytes"]),
            f"r = hidden / (2 n_kv d) = {ratio:.4g}: {says}",
        )
    )
    return rows


def _fit(plan: dict[str, Any]) -> dict[str, Any]:
    """Whether weights, K and V fit into memory as it is now; `usable_bytes` is None where nothing
    says how much there is."""
    needed, usable = (
        plan["weights"]["total_bytes"] + plan["kv"]["total_bytes"],
        usable_memory_bytes(),
    )
    fits = usable is not None and needed <= usable and not plan["weights"]["layers_streamed"]
    return {"needed_bytes": needed, "usable_bytes": usable, "fits": fits}


def _says(plan: dict[str, Any], fit: dict[str, Any]) -> tuple[str, str, str]:
    free = "unknown" if fit["usable_bytes"] is None else format_size(fit["usable_bytes"])
    if fit["fits"]:
        verdict = FITS + (", but for keeping contexts (resume)" if plan["resume"] else "")
    else:
        verdict = (
            "layers are streamed"
            if plan["weights"]["layers_streamed"]
            else "it does not fit in memory"
        )
        if (
            fit["usable_bytes"] is not None
            and plan["weights"]["resident_bytes"] > fit["usable_bytes"]
        ):
            verdict = (
                "the weights do not fit: --memory SIZE streams them, and the times below are of a "
                "machine where they do"
            )
    return (
        "all in memory",
        format_size(fit["needed_bytes"]),
        f"beside activations; free here: {free}; {verdict}",
    )


def _resumed(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A prompt that was read before: computed anew, or its K and V read."""
    resume = plan["resume"]
    if not resume:
        return [("resume", "n/a", "layers that are not full attention: no cache can be kept")]
    size = format_size(resume["kv_bytes"])
    if "recompute_s" not in resume:
        return [
            (
                "resume",
                "n/a",
                (
                    f"needs --storage DIR; break-even: {size} x rate / {resume['operations']:.4g} "
                    "operations"
                ),
            )
        ]
    even, found = resume["break_even_bytes_per_s"], plan["speeds"]["storage_bytes_per_s"]
    sooner = "reading" if found > even else "computing"
    return [
        (
            "resume",
            f"{resume['read_s']:.4g} s",
            f"to read K and V of {resume['tokens']:,} tokens, kept: {size} (modelled)",
        ),
        (
            "  recompute",
            f"{resume['recompute_s']:.4g} s",
            f"{resume['operations']:.4g} operations, at least (modelled)",
        ),
        (
            "  break-even",
            f"{format_size(int(even))}/s",
            f"from there on reading is sooner; here {format_size(found)}/s: {sooner} is",
        ),
    ]


def _times(plan: dict[str, Any], bound_by: str | None, batch: int) -> list[tuple[str, str, str]]:
    step, speeds, seconds = plan["step"], plan["speeds"], plan["seconds"]
    needs = {
        "disk": step["read_bytes"],
        "disk of weights": step["read_weight_bytes"],
        "disk of K and V": step["read_kv_bytes"],
        "memory": step["memory_bytes"],
    }
    if bound_by is None:
        return [
            ("last step", "n/a", "needs --storage DIR: nothing was measured"),
            ("  disk", "n/a", f"{format_size(step['read_bytes'])} / bandwidth"),
            ("  memory", "n/a", f"{format_size(step['memory_bytes'])} / bandwidth"),
            ("  compute", "n/a", f"{step['operations']:.4g} operations / rate"),
        ]
    of = {
        "disk": "storage_bytes_per_s",
        "disk of weights": "weights_bytes_per_s",
        "disk of K and V": "storage_bytes_per_s",
        "memory": "memory_bytes_per_s",
    }
    longest = seconds[bound_by]
    rate = f"at most {batch / longest:.4g} tokens a second" if longest else "nothing to wait for"
    rows = [("last step", f"{longest:.4g} s", f"at least (modelled), bound by {bound_by}: {rate}")]
    for name, value in seconds.items():
        if name == "compute":
            how = (
                f"{step['operations']:.4g} operations at "
                f"{speeds['gemm_operations_per_s'] / 1e9:.4g} G/s (measured)"
            )
        else:
            path = f" by {speeds['storage_path']}" if name.startswith("disk") else ""
            how = (
                f"{format_size(needs[name])} at {format_size(speeds[of[name]])}/s (measured{path})"
            )
        rows.append((f"  {name}", f"{value:.4g} s", how))
    return rows


def _drafts(draft: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Several tokens from a pass."""
    if not draft:
        return []
    share, gamma, known = draft["share"], draft["gamma"], draft["tokens_a_pass"]
    rows = [
        (
            f"draft {draft['kind']}",
            format_size(draft["memory_bytes"]),
            f"of memory: {share:.3g} of K and V, and the ends"
            if share is not None
            else "of memory: all of K and V in four bits"
            if draft["kind"] == "4bit"
            else "of memory",
        )
    ]
    if draft["read_ahead_bytes"]:
        rows.append(
            (
                "  read ahead",
                format_size(draft["read_ahead_bytes"]),
                "of memory, at most: read for a pass while drafts are made",
            )
        )
    if known is not None:
        rows.append(
            (
                "  tokens a pass",
                f"{known:.3g}",
                f"of {gamma} proposed, as the demo's model had it (measured); others differ",
            )
        )
    if "pass_s" not in draft:
        return rows
    pays = f"one by one is slower from {draft['least_tokens_a_pass']:.3g} tokens a pass on"
    rows += [
        ("  a pass", f"{draft['pass_s']:.4g} s", f"over {gamma + 1} positions (modelled); {pays}"),
        (
            "  a draft step",
            f"{draft['draft_s']:.4g} s",
            (
                f"which reads nothing (modelled); {gamma} of them hide {draft['hidden_s']:.4g} s "
                "of the pass's reads"
            ),
        ),
    ]
    if draft["token_s"] is not None:
        rows.append(("  a token", f"{draft['token_s']:.4g} s", "of each sequence (modelled)"))
    return rows
