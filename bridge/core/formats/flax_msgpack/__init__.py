"""What flax.serialization writes, read in parts and without flax."""
