"""How a source's files are found and read: regular files only, into memory of our own, with limits."""
