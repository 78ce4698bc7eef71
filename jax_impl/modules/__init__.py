"""The skins: flax nnx, linen and plain pytrees, and what stands in them for the parameters of units."""
