"""The lowest floor, which everything else uses: layouts, policies, checkpoint formats, mappings."""
