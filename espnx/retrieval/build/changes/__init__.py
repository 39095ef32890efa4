"""Changes of a published store: documents added, deleted, taken out; what many changes left
compacted."""
