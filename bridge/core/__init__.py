"""What everything else stands on: layouts and policies, checkpoint formats, mappings between models."""
