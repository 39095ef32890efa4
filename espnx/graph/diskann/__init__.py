"""To and from the files of DiskANN."""
