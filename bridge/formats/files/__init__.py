"""How bytes get to disk: atomic directories, journals, manifests, mapped and direct files."""
