"""The error of a plan that cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan cannot be made from the user's input; the text says what was expected and what was given."""
