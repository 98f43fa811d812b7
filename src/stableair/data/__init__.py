"""Data sets, the data folder, and the partition of samples over clients."""
