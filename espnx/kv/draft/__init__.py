"""Drafts: tokens that are proposed for nothing, to be verified in one pass over the stored rows;
tensors only."""
