"""A decoder whose K and V are larger than any memory, on machines that are not here."""
