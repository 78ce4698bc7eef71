"""Layouts of flat buffers: which elements of which tensor are on which rank."""
