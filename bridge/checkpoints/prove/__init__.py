"""Proofs of conversions: the destination's own library restores the result, and both sides take an equal step."""
