"""Finding and reading a source's files: only regular files, read into our own memory, with limits."""
