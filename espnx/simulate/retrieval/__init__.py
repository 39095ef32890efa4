"""Retrieval for language models on machines that are not here: what finds passages, from words to
the model's answer."""
