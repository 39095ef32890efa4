"""From a query to hits: candidates, reads that start before all of them are known, scores as
records arrive."""
