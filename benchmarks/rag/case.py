"""``espnx bench rag``: prompts composed of passages whose K and V are kept on SSD, beside computing
them, one kept prefix, and memory; and answers with their references."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from ..harness.registry import Case, Say
from ..harness.result import Row
from .names import SHOWS
from .table import VIEWS, table

DESCRIPTION = """Passages are computed once behind a prefix of 32 tokens, kept by PassageKV, and
read from then on (docs/passages.md). Results are verified first.

ttft: seconds to the first token of a question of 64 tokens, another one in each turn. composed:
passages are read from the library; recomputed: the same prompt, with transformers' cache in memory;
kept-prefix: a KVCache that holds as many tokens of one text by name; rows-in-ram: the rows that
composed reads, in memory, attended to in the same way; keys-rotated: transformers' cache, filled
with those rows and their keys rotated to their place, which is not counted, and which composed's
logits are held against; fio: reading as many bytes.
shared: 16 questions at once behind the same 8 passages, beside one after the other and beside
memory; how often each passage's rows of a layer are read is counted.
answers: passages of docstrings, some of them with a KEY line (docs/demo-model.md), are indexed and
asked for through espnx.Rag: composed from SSD, the same blocks in memory, and full attention. The
heads of attention are chosen on other questions. No times.
quality: planted facts and held-out text, 6 passages of 128 tokens, with what each way to reuse them
loses against full attention. Two are there to be compared with, in memory: random-0.15 computes as
many tokens anew as blend-0.15, drawn at random; composite leaves every passage at the positions it
was computed at. No times.

  # does everything work here?
  espnx bench rag --path /mnt/nvme --quick
  espnx bench rag --path /mnt/nvme --show ttft --model smollm2
  espnx bench rag --path /mnt/nvme --show shared --model smollm2
  espnx bench rag --path /mnt/nvme --show answers --model demo
  espnx bench rag --path /mnt/nvme --show quality --model demo,smollm2

Models compute in fp32. smollm2: SmolLM2-135M-Instruct (espnx weights smollm2; pip install
'espnx[gguf]'); demo: the small model of espnx, which alone has KEY lines; or a folder of a Hugging
Face model. answers needs the encoder minilm."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the SSD (default: the current one)",
    )
    add(
        "--show",
        metavar="S,...",
        help=f"{', '.join(SHOWS)} (default: ttft; with --quick all of them)",
    )
    add("--model", metavar="M,...", default="demo", help="demo (default), smollm2, or folders")
    add(
        "--tokens",
        metavar="N,...",
        default="2048,7168",
        help="of all passages, for ttft (default: 2048,7168; --quick: 512)",
    )
    add(
        "--passage-tokens",
        metavar="N,...",
        default="128,512",
        help="of one passage, for ttft (default: 128,512; --quick: 128)",
    )
    add(
        "--passages",
        type=int,
        metavar="N",
        default=10_000,
        help="for answers (default: 10000; --quick: 48)",
    )
    add(
        "--questions",
        type=int,
        metavar="N",
        help="of answers (default: 200; --quick: 8), of quality (default: 80; --quick: 3)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures what `--show` names. Raises InvalidInputError, MissingDependencyError, and what
    building, reading and computing raise."""
    from .measure import measure_shows
    from .options import read_options

    return measure_shows(read_options(args), say)


CASE = Case(
    "rag",
    "prompts composed of passages on SSD, and answers with references",
    configure,
    run,
    table,
    views=VIEWS,
)
