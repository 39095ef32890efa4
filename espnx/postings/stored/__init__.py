"""What lies on storage: the sections of a segment, how each is checked, and a segment that is
open."""
