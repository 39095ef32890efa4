"""A program that ran elsewhere, as its trace says, on machines that are not here."""
