"""RAGX's retrievers over private partitions: what each device reads, and what crosses its link."""
