"""Layouts of flat buffers: which elements of which tensor lie on which rank."""
