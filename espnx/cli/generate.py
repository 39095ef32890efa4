"""``espnx generate``: a file of prompts through a model whose KV cache lies on SSD."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .output import add_json_option, emit, json_document, render_table

if TYPE_CHECKING:
    from ..integrations.generate.generate import Report


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limit = "" if most is None else f", at most {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, at least {least}{limit}")
        return value

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number, at least 0")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a Hugging Face model with its tokenizer")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='a prompt a line, or .jsonl with {"id": ..., "prompt": ...}')
    parser.add_argument("--storage", required=True, action="append", metavar="DIR", help="on the SSD; may be repeated, once for each SSD")
    parser.add_argument(
        "--out", metavar="FILE", help="results, a JSON line each; a second run goes on after them (default: PROMPTS.out.jsonl)"
    )
    parser.add_argument(
        "--batch", type=_whole_number(1), default=4, metavar="N", help="prompts at a time, of like length (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=_whole_number(1), default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-beams", type=_whole_number(1), default=1, metavar="N", help="beam search (default: none)")
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="sample (default: take the likeliest token)")
    parser.add_argument("--seed", type=_whole_number(0, 2**63 - 1), default=0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--prefill-chunk", type=_whole_number(1), metavar="N", help="read prompts N tokens at a time, to bound memory (default: at once)"
    )
    parser.add_argument(
        "--x-rows", type=_whole_number(0), metavar="N", help="sequences that keep X instead of K and V (default: decided by measurement)"
    )
    parser.add_argument("--format", choices=("int8",), help="of stored rows; lossy (default: as the model computes them)")
    parser.add_argument(
        "--capacity", type=_whole_number(1), metavar="TOKENS", help="reserve space for so many tokens of each sequence at the start"
    )
    parser.add_argument("--memory", metavar="SIZE", help="stream weights that do not fit into so much (default: load them all)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: that of the checkpoint")
    parser.add_argument("--engine", default="auto", help="auto, uring, posix (default: %(default)s)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..integrations.generate.generate import generate_file
    from ..integrations.generate.model_folder import load_model, model_fingerprint
    from ..integrations.generate.prompt_files import read_done, read_prompts
    from .progress import ProgressLine

    prompts = read_prompts(args.prompts)
    out = args.out or f"{args.prompts}.out.jsonl"
    torch.manual_seed(args.seed)
    generate_options: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "num_beams": args.num_beams,
        "do_sample": args.temperature > 0,
    }
    if args.temperature > 0:
        generate_options["temperature"] = args.temperature
    if args.prefill_chunk:
        generate_options["prefill_chunk_size"] = args.prefill_chunk
    names = ("model", "max_new_tokens", "num_beams", "temperature", "seed", "format", "dtype")
    settings = {name: getattr(args, name) for name in names} | {"model_fingerprint": model_fingerprint(args.model)}
    read_done(out, settings, prompts)  # what it refuses it refuses before a model is loaded
    cache_options = {"x_rows": args.x_rows, "format": args.format, "capacity_tokens": args.capacity, "engine": args.engine}
    model, tokenizer = load_model(args.model, args.memory, getattr(torch, args.dtype) if args.dtype else None)
    with ProgressLine() as progress:
        report = generate_file(
            model, tokenizer, prompts, out, args.storage, batch_size=args.batch, settings=settings, cache_options=cache_options,
            generate_options=generate_options, progress=lambda done, total: progress.update("prompts", done, total),
        )  # fmt: skip
    document = json_document("generate", out=out, prompts=report.prompts, skipped=report.skipped, batches=report.stats)
    emit(args, _text(report, out, args.x_rows is not None), document)
    return 0


def _text(report: Report, out: str, is_asked: bool) -> str:
    rows: list[tuple[str, object]] = [("results", out), ("prompts", f"{report.prompts} now, {report.skipped} before")]
    if report.stats:
        last = report.stats[-1]
        for name in ("prefill", "decode"):
            tokens, seconds = report.total(f"{name}_tokens"), report.total(f"{name}_s")
            rows.append((name, f"{tokens:,.0f} tokens, {tokens / seconds:,.1f} tokens/s" if seconds else f"{tokens:,.0f} tokens"))
        written, asked, moved = (report.total(f"bytes_{name}") / 2**20 for name in ("written", "asked", "moved"))
        rows += [
            ("bytes", f"{written:,.1f} MiB written, {asked:,.1f} MiB asked, {moved:,.1f} MiB moved"),
            ("effective path", last["effective_path"]),
            ("waited for the disk", f"{report.total('waiting_s'):.1f} s"),
            ("a decode step", "-" if last["step_s"] is None else f"{last['step_s']:.3f} s measured{_predicted(last)}"),
            ("sequences kept as X", f"{last['x_rows']}, as asked" if is_asked else _decision(last)),
        ]
    return render_table(("", ""), rows)


def _predicted(stats: dict[str, Any]) -> str:
    decision = stats["decision"]
    return f", {decision['predicted_s'][decision['x_rows']]:.3f} s predicted" if decision and decision["predicted_s"] else ""


def _decision(stats: dict[str, Any]) -> str:
    decision = stats["decision"]
    return f"{stats['x_rows']} ({decision['why'] if decision else 'nothing to decide'})"
