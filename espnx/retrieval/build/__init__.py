"""From documents to a store, and what changes one: build, add, delete, compact, detach."""
