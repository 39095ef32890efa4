"""Answers from an index, with references: passages found, numbered and put before a question, and
for each statement of the answer the evidence that a reader can open."""
