"""What a unit computes again in backward: ``recompute`` of a policy's units.

    false                               nothing: what backward needs is kept
    true                                everything: the unit's inputs alone are kept
    "dots_saveable"                     everything but products: their results are kept
    "dots_with_no_batch_dims_saveable"  everything but products with weights: those of batches of matrices, as between
                                        queries and keys, are computed again

The names are those of ``jax.checkpoint_policies``. In PyTorch they stand for the operators that compute such products.
A fused attention kernel is no product, and runs again.
"""

from __future__ import annotations

from typing import TypeGuard

Recompute = bool | str

SELECTIVE = ("dots_saveable", "dots_with_no_batch_dims_saveable")
"""Names of what is kept of a unit that recomputes the rest."""
RECOMPUTE_WORDS = f"true, false or one of {', '.join(SELECTIVE)}"


def is_recompute(value: object) -> TypeGuard[Recompute]:
    """Whether a unit may have this."""
    return isinstance(value, bool) or (isinstance(value, str) and value in SELECTIVE)


def why_not_around(recompute: Recompute, path: str, inside: str) -> str | None:
    """Why the unit ``path`` cannot be recomputed so around a unit ``inside`` of it; None where it can."""
    if isinstance(recompute, bool):
        return None
    return (
        f"unit {path!r}: recompute: expected true or false for a unit that contains units, since the values kept for "
        f"the inner units would be kept twice, got {recompute!r} around {inside!r}; set it on the inner units"
    )
