"""AdamW over main weights, how its moments are stored, and where its state lives."""
