"""Many additions of one document to a large store."""
