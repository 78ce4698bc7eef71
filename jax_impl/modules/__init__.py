"""The skins: flax nnx, linen and plain pytrees, and the slots where units stand in them."""
