"""The language of mappings: files, rules, entries, axes, operations and arithmetic."""
