"""What of a store is open, version by version: first stages, tables, records in memory."""
