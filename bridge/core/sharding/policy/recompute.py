"""What a unit recomputes in backward: ``recompute`` of a policy's units.

    false                               nothing: everything that backward needs is kept
    true                                everything: only the unit's inputs are kept
    "dots_saveable"                     everything except products: their results are kept
    "dots_with_no_batch_dims_saveable"  everything but products with weights: those of batches of matrices, as between
                                        queries and keys, are computed again

The names are those of ``jax.checkpoint_policies``. In PyTorch they mean the operators that compute such products. A
fused attention kernel is not a product, and runs again.
"""

from __future__ import annotations

from typing import TypeGuard

Recompute = bool | str

SELECTIVE = ("dots_saveable", "dots_with_no_batch_dims_saveable")
"""Names of the values that are kept in a unit that recomputes the rest."""
RECOMPUTE_WORDS = f"true, false or one of {', '.join(SELECTIVE)}"


def is_recompute(value: object) -> TypeGuard[Recompute]:
    """Whether this is a valid value for a unit."""
    return isinstance(value, bool) or (isinstance(value, str) and value in SELECTIVE)


def why_not_around(recompute: Recompute, path: str, inside: str) -> str | None:
    """Why the unit ``path`` cannot be recomputed this way around a unit ``inside``; None if it can."""
    if isinstance(recompute, bool):
        return None
    return (
        f"unit {path!r}: recompute: expected true or false for a unit that contains units, since the values kept for "
        f"the inner units would be kept twice, got {recompute!r} around {inside!r}; set it on the inner units"
    )
