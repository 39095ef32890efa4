"""Traces: what devices were asked, one line for each command (docs/trace-format.md), written while
a program runs, and read again."""
