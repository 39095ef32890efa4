"""What is simulated, as files: GPUs, hosts, networks, programs, systems of them, and workloads."""
