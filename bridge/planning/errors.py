"""What goes wrong in a plan through no fault of the program."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan was asked for that cannot be made; the text says what was expected and what was given."""
