"""Model weights streamed layer by layer from safetensors files."""
