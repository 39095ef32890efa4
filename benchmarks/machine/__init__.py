"""The machine under measurement: page cache, memory groups, disk limits, counters."""
