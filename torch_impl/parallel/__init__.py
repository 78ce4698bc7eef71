"""Modules cut over a model axis by a policy: what is cut, how such modules compute, and what they exchange."""
