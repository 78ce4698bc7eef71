"""Writing bytes to disk: atomic directories, journals, manifests, files with direct I/O; and reading them."""
