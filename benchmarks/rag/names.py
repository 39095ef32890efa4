"""What can be measured. A file of its own: the command line names it without importing the rest."""

SHOWS = ("ttft", "shared", "answers", "quality")
