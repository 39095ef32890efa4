"""What ``espnx bench kv`` can be asked for by name. Apart from `options`, which loads PyTorch:
``--help`` lists the names without it."""

SHOWS = (
    "decode", "spill", "context", "batch", "attend", "x", "x-sweep", "rss", "growth", "resume",
    "speculation", "gamma", "long", "acceptance",
)  # fmt: skip
#: Shows that bring what they are compared with, and take no `--baseline`.
ALONE = ("attend", "x", "resume", "speculation", "gamma", "long", "acceptance")
BASELINES = ("host", "dynamic", "static", "memmap", "flexgen-disk", "fio")
