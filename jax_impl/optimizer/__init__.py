"""AdamW over main weights, and where its state lives."""
