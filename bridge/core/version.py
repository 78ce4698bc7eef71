"""The version, on the lowest floor: a conversion's journal records it, so that two versions never share a journal."""

__version__ = "0.1.0"
