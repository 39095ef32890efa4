"""Commands about this machine: what works on it, what it has, what is installed."""
