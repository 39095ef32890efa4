"""What ``espnx bench retrieval`` can be asked for by name. Apart from `options`, which loads
PyTorch: ``--help`` lists them without it."""

SHOWS = (
    "table",
    "batches",
    "layout",
    "hit-rate",
    "formats",
    "index-memory",
    "callers",
    "cascade",
    "sizes",
)
#: Those that `--throttle` has.
THROTTLED = ("table", "batches", "callers", "cascade", "sizes")
BASELINES = ("memory", "mmap-1", "mmap-2", "mmap-8", "mmap-willneed", "swap")
