"""What holds for every near-storage device, as checks that run on any: `espnx device verify NAME`,
and tests of a package of yours."""
