"""How bytes get to disk: atomic directories, journals, manifests, direct files; how they are read."""
