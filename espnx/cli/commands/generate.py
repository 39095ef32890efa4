"""``espnx generate``: a file of prompts through a model whose KV cache lies on SSD."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...models import model_folder
from ...suggestions import downloading
from ...tables import render_table
from ..device_options import add_device_options, at_least_0, devices_of
from ..draft_options import add_draft_options, check_draft
from ..output import add_json_option, emit, json_document

if TYPE_CHECKING:
    from ...device.emulation.use import DeviceUse
    from ...integrations.generate.generate import Report
    from ..progress import ProgressLine


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limit = "" if most is None else f", at most {most}"
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected a whole number, at least {least}{limit}"
            )
        return value

    return parse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face model with its tokenizer; demo: the small one of espnx",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line, or .jsonl with {"id": ..., "prompt": ...}',
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be repeated. What follows it is printed",
    )
    parser.add_argument(
        "--storage",
        required=True,
        action="append",
        metavar="DIR",
        help="on the SSD; may be repeated, once for each SSD",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=(
            "results, a JSON line each, in the order of the prompts; a second run goes on after "
            "them (default: PROMPTS.out.jsonl; with --prompt none)"
        ),
    )
    parser.add_argument(
        "--batch",
        type=_whole_number(1),
        default=4,
        metavar="N",
        help="prompts at a time, of like length (default: %(default)s)",
    )
    _add_sampling(parser)
    _add_caching(parser)
    add_device_options(parser)
    add_json_option(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=_whole_number(1),
        default=64,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--num-beams",
        type=_whole_number(1),
        default=1,
        metavar="N",
        help="beam search (default: none)",
    )
    parser.add_argument(
        "--temperature",
        type=at_least_0,
        default=0.0,
        metavar="T",
        help="sample (default: take the likeliest token)",
    )
    parser.add_argument(
        "--seed",
        type=_whole_number(0, 2**63 - 1),
        default=0,
        help="of sampling (default: %(default)s)",
    )


def _add_caching(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-chunk",
        type=_whole_number(1),
        metavar="N",
        help="read prompts N tokens at a time, to bound memory (default: at once)",
    )
    parser.add_argument(
        "--x-rows",
        type=_whole_number(0),
        metavar="N",
        help="sequences that keep X instead of K and V (default: decided by measurement)",
    )
    parser.add_argument(
        "--format",
        choices=("int8", "fp16", "bf16"),
        help="of stored rows, lossy where the model's is finer (default: as it computes them)",
    )
    parser.add_argument(
        "--capacity",
        type=_whole_number(1),
        metavar="TOKENS",
        help="reserve space for so many tokens of each sequence at the start",
    )
    add_draft_options(parser.add_argument)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="stream weights that do not fit into so much (default: load them all)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="default: that of the checkpoint",
    )
    parser.add_argument(
        "--engine",
        default="auto",
        help="auto, uring, posix, or settings such as nvme.toml (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from ..progress import ProgressLine

    if bool(args.prompts) == bool(args.prompt):
        raise InvalidInputError(
            "espnx generate",
            got="both --prompts and --prompt" if args.prompts else "no prompt",
            expected="--prompts FILE or --prompt TEXT",
        )
    _check_draft(args)
    args.model = model_folder(args.model)
    out = args.out or (f"{args.prompts}.out.jsonl" if args.prompts else None)
    if not os.path.exists(args.model):  # before seconds of imports
        raise InvalidInputError(
            f"model in {args.model}",
            got="no such folder",
            expected="a folder with model and tokenizer, or a GGUF file",
            fix=downloading(args.model),
        )
    for directory in args.storage:
        check_given_directory(directory)
    if args.prompts and not os.path.exists(args.prompts):
        raise InvalidInputError(
            f"prompts {args.prompts}",
            got="no such file",
            expected="a readable file, a prompt a line or JSON lines",
        )
    with ProgressLine() as progress:
        try:
            report, use = _generate(args, out, progress)
        except BaseException as error:
            is_under_way = (
                not isinstance(error, InvalidInputError) and out is not None and os.path.exists(out)
            )
            if is_under_way and os.path.getsize(str(out)):
                error.add_note(f"the same command goes on after the results in {out}")
            raise
    document = json_document(
        "generate",
        out=out,
        prompts=report.prompts,
        skipped=report.skipped,
        batches=report.stats,
        results=report.results,
        device=None if use is None else asdict(use),
    )
    texts = [f"{args.prompt[int(line['id']) - 1]}\n{line['text']}\n" for line in report.results]
    emit(args, "\n".join([*texts, _text(report, out, use)]), document)
    return 0


def _check_draft(args: argparse.Namespace) -> None:
    """Raises InvalidInputError for what does not go together, before seconds of imports."""
    check_draft(args)
    if args.draft != "none" and args.num_beams > 1:
        raise InvalidInputError(
            f"--draft {args.draft}",
            got=f"--num-beams {args.num_beams}",
            expected="no beams: they are not one text after another",
            fix="--draft none",
        )
    if args.draft in ("pages", "4bit") and args.x_rows:
        raise InvalidInputError(
            f"--draft {args.draft}",
            got=f"--x-rows {args.x_rows}",
            expected="K and V of all sequences",
            fix="--x-rows 0, or --draft lookup",
        )


def _generate(
    args: argparse.Namespace, out: str | None, progress: ProgressLine
) -> tuple[Report, DeviceUse | None]:
    with progress.loading("PyTorch and transformers"):
        import torch

        from ...device.emulation.use import watch
        from ...integrations.generate.generate import generate_file
        from ...integrations.generate.model_folder import load_model, model_fingerprint
        from ...integrations.generate.prompt_files import Prompt, read_done, read_prompts
        from ...integrations.transformers.speculation.generate import generate

    prompts = (
        read_prompts(args.prompts)
        if args.prompts
        else [Prompt(str(i), text) for i, text in enumerate(args.prompt, 1)]
    )
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
    settings = {name: getattr(args, name) for name in names} | {
        "model_fingerprint": model_fingerprint(args.model)
    }
    if args.device:
        settings["device"] = args.device
    if args.draft != "none" and args.temperature > 0:
        settings["draft"] = args.draft  # the same distribution, and other draws
    if out is not None:
        read_done(out, settings, prompts)  # what it refuses it refuses before a model is loaded

    def idle() -> str:
        if not report.prompts:
            return "all results were there already"
        return (
            "all K and V stayed in memory, as they are written once they fill a page; longer "
            "prompts or answers do"
        )

    with devices_of(args, args.storage, idle=idle) as device:
        with progress.loading(f"model {args.model}"):
            model, tokenizer = load_model(
                args.model, args.memory, getattr(torch, args.dtype) if args.dtype else None
            )
        cache_options = {
            "x_rows": args.x_rows,
            "format": args.format,
            "capacity_tokens": args.capacity,
            "engine": args.engine,
            "device": device,
        }
        if args.draft != "none":
            cache_options |= {
                "draft": args.draft,
                "draft_memory": args.draft_memory,
                "draft_read_ahead_bytes": args.draft_read_ahead,
            }
            generate_options["custom_generate"] = generate
        with watch(
            *(device if isinstance(device, Sequence) else [device]), bench="--show topology"
        ) as watched:
            report = generate_file(
                model,
                tokenizer,
                prompts,
                out,
                args.storage,
                batch_size=args.batch,
                settings=settings,
                cache_options=cache_options,
                generate_options=generate_options,
                progress=lambda done, total: progress.update("prompts", done, total),
            )
        return report, watched.use


def _text(report: Report, out: str | None, use: DeviceUse | None) -> str:
    from ...integrations.transformers.summary import work

    rows: list[tuple[str, object]] = [("prompts", f"{report.prompts} now, {report.skipped} before")]
    if out is not None:
        rows.insert(0, ("results", out))
    if use is not None:
        rows += [
            ("" if number else "devices", line.strip())
            for number, line in enumerate(use.summary().splitlines())
        ]
    return render_table(("", ""), rows + (work(report.stats) if report.stats else []))
