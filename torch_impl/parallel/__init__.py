"""Modules that a policy cuts over a model axis: their cuts, their computation, and their communication."""
