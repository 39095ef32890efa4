"""Hugging Face models whose K and V lie on SSD: `KVCache`, `enable_kv_cache`, and how attention
asks the cache."""
