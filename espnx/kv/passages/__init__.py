"""The KV of passages on disk: a library of extents that prompts and processes share, and attention
over what a prompt is composed of, wherever each passage stands in it."""
