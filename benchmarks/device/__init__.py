"""Near-storage devices: what their verbs bring on this machine."""
