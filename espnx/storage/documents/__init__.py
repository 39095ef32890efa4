"""Ids and texts of records, as stores keep them on storage, and look them up."""
