"""The version, on the lowest floor: the journal of a conversion names it, so that two versions never share one."""

__version__ = "0.1.0"
