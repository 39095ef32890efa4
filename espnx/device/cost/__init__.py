"""What commands cost a device of a spec: pure functions, one file a verb. No clock, no ticket, no
file."""
