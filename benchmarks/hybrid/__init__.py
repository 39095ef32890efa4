"""Words beside vectors: what each first stage finds, and what they find together."""
