"""Generation for files of prompts."""
