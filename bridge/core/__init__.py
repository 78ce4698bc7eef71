"""The lowest floor, on which everything else stands: layouts, policies, checkpoint formats, mappings."""
