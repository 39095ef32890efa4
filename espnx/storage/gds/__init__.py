"""GPUDirect Storage: cuFile behind a door of its own, as an engine like the others."""
