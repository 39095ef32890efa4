"""``espnx bench kv``: decoding with K and V on SSD, beside caches in memory, memory-mapped files,
FlexGen and fio."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from ..harness.registry import Case, Say
from ..harness.result import Row
from .names import BASELINES, SHOWS
from .table import VIEWS, table

DESCRIPTION = """A model with random weights decodes; each system runs in a process of its own and
all take turns, in shuffled order. Nobody prefills: every system starts from the same seeded random
K and V, written where its prefill would have left them. All are fed the same tokens, and the tokens
and logits that come out are compared before there is a ratio, the median over the turns of the
baseline's time over ours (above 1: ours is faster). A turn begins with nothing read ahead.

  # does everything work here?
  espnx bench kv --path /mnt/nvme --quick
  espnx bench kv --path /mnt/nvme --model opt-1.3b --batch 4 --context 3840 \\
      --baseline dynamic,memmap,flexgen-disk,fio --throttle 800MB/s
  # sweeps up to --context and --batch
  espnx bench kv --path /mnt/nvme --show context,batch --model llama-small
  # where memory ends; caches in memory take part as long as they fit
  espnx bench kv --path /mnt/nvme --show context --model llama-small --context 131072 --memory 1GiB
  # spill intervals: requests, bytes, time
  espnx bench kv --path /mnt/nvme --show spill --model opt-125m
  # attention from memory, GB/s of one thread
  espnx bench kv --show attend
  # X rows absorbed, and K and V recomputed from them
  espnx bench kv --show x --model opt-1.3b
  # X rows of none to all, and the scheduler's choice
  espnx bench kv --path /mnt/nvme --show x-sweep --model opt-1.3b --throttle 800MB/s
  # peak memory of decoding and of prefill in chunks
  espnx bench kv --path /mnt/nvme --show rss
  # time to first token, kept or not
  espnx bench kv --path /mnt/nvme --show resume --model smollm2 --dtype fp32 --batch 1 \\
      --context 7680
  # several tokens from a pass, beside one by one; and without times, tokens a pass alone
  espnx bench kv --path /mnt/nvme --show speculation --model smollm2 --dtype fp32 --batch 8 \\
      --context 7680 --throttle 800MB/s
  espnx bench kv --path /mnt/nvme --show acceptance --model smollm2 --dtype fp32 --batch 1 \\
      --context 7680
  # how many tokens are proposed, chosen beside 0, 2, 4, 8 and 16; at both rates of the disk
  espnx bench kv --path /mnt/nvme --show gamma --model smollm2 --dtype fp32 --batch 8 \\
      --context 7680 --throttle 400MB/s --new 32 --pairs 1
  # 261,120 tokens of K and V in bf16, 6 GB, in 2 GiB of memory
  espnx bench kv --path /mnt/nvme --show long --model smollm2 --dtype fp32 --batch 34 \\
      --context 7680 --throttle 400MB/s --memory 2GiB --new 24 --pairs 1
  # memory beside what is stored
  espnx bench kv --path /mnt/nvme --show growth --model llama-rows --batch 256 --context 2048 \\
      --dtype fp32

host: our reads, attention in the framework. dynamic, static: transformers' caches in memory.
memmap: a file for each layer, gathered in each step. flexgen-disk: FlexGen 0.1.8 (pip install
--no-deps flexgen==0.1.8; pip install pulp attrs tqdm), OPT in fp16 only, with `--gpu-batch-size B
--num-gpu-batches 1 --overlap true --percent 100 0 0 0 100 0`. fio: the best of 256KiB/QD32,
512KiB/QD16 and 960KiB/QD8 on as many bytes as a step. The page cache of each process gets a quarter
of the KV (--memory auto, root). smollm2: SmolLM2-135M-Instruct with its own weights (espnx weights
smollm2; pip install 'espnx[gguf]')."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the disk to measure (default: the current one)",
    )
    add(
        "--show",
        metavar="S,...",
        default="decode",
        help=f"what to measure: {', '.join(SHOWS)} (default: decode)",
    )
    add(
        "--model",
        metavar="CONFIG",
        default="opt-125m",
        help="opt-125m (default), opt-1.3b, llama-small, -mha, -rows, smollm2, demo, a JSON file",
    )
    add(
        "--batch",
        type=int,
        metavar="B",
        default=4,
        help="sequences (default: 4; with --quick at most 2)",
    )
    add(
        "--context",
        type=int,
        metavar="S",
        default=3840,
        help="cached tokens of each at the start (default: 3840; --quick: at most 512)",
    )
    add(
        "--new",
        type=int,
        metavar="N",
        help="measured tokens of each sequence (default: as many as --pairs and --steps give)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        default=1,
        help="tokens of a turn (default: 1; more when read-ahead is worth much of a step)",
    )
    add(
        "--dtype",
        choices=("fp16", "bf16", "fp32"),
        default="fp16",
        help="of weights, K and V (default: fp16, as FlexGen has it)",
    )
    add(
        "--format",
        metavar="F,...",
        default="same",
        help="of stored rows: same (as they are), int8; each is a system (default: same)",
    )
    add(
        "--spill",
        metavar="N,...",
        default="1,4,16,64,256",
        help="intervals of --show spill (default: 1,4,16,64,256)",
    )
    add(
        "--x-rows",
        metavar="N,...",
        default="0",
        help="sequences that keep X instead of K, V: numbers, auto; each a system (default: 0)",
    )
    add("--baseline", metavar="B,...", help=f"{', '.join(BASELINES)} (default: dynamic,memmap,fio)")
    add("--read-ahead", metavar="SIZE", help="of espnx (default: its own)")
    add("--draft-read-ahead", metavar="SIZE", help="read while drafts are made (default: its own)")
    add("--threads", type=int, metavar="N", help="of espnx (default: as many as PyTorch uses)")
    add("--engine", default="auto", help="of espnx: auto, uring, posix (default: auto)")
    add(
        "--memory",
        metavar="M",
        default="auto",
        help="limit of each measured process: auto, ample, or a size (root; default: auto)",
    )
    add(
        "--record",
        metavar="DIR",
        help="each system of ours once more, with a trace written into DIR (NAME-recorded.trace)",
    )
    add("--throttle", metavar="RATE", help="slow the disk down, such as 800MB/s (root, cgroup v1)")


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures what `--show` names. Raises InvalidInputError, PathUnavailableError (no limits
    here), MissingDependencyError."""
    from .options import read_options
    from .sweeps import measure_shows

    return measure_shows(read_options(args, say), say)


CASE = Case(
    "kv",
    "decoding with K and V on SSD, beside memory, mmap, FlexGen and fio",
    configure,
    run,
    table,
    views=VIEWS,
)
