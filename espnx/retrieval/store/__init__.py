"""What a published store is: its parts, tiers, records, ids and texts, opened and read."""
