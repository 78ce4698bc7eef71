"""Files of flax.serialization, read in parts and without flax."""
