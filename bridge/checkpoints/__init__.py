"""What one does with checkpoints: convert, diff, verify and summarize them, whatever their formats."""
