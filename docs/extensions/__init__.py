"""Sphinx extensions of this site: what is generated, how links to source files are shown, and what is checked."""
