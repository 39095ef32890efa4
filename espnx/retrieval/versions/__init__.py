"""How a store gets a new version: segments are written, parts merged, a manifest is published, and
what nothing names is removed."""
