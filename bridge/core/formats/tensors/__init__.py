"""What every format shares about one tensor: boxes, dtypes, chunks, names of leaves, checksums."""
