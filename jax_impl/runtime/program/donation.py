"""Arrays that were given up to a program, which may have taken their memory."""

from __future__ import annotations

import jax


def check_not_donated(name: str, array: jax.Array) -> None:
    """Raises ``ValueError`` for an array without values."""
    # XLA does not check: a program that is given such an array crashes.
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
        raise ValueError(
            f"{name}: expected values, got an array that was given up (donated) to an earlier step: go on with the "
            "state which that step returned"
        )
