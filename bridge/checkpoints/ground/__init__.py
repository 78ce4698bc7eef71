"""Common ground of converting, comparing and verifying: selections, casts, workers, borrowed memory."""
