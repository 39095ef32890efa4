"""The disk: the storage engine beside fio and mmap."""
