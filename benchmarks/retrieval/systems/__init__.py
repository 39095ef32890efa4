"""What search from SSD is measured beside: all records at one range of addresses."""
