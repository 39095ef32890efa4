"""Segments of postings on devices that scan them: what each is asked, and what it has to know."""
