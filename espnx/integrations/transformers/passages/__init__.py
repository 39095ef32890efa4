"""Prompts that are composed of passages whose K and V lie in a library on SSD, for transformers'
models."""
