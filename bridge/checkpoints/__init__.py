"""Operations on checkpoints of any format: convert, diff, verify and summarize."""
