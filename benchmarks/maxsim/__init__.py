"""MaxSim on the CPU beside other implementations."""
