"""What converting, comparing and verifying share: selections, casts, workers, borrowed memory."""
