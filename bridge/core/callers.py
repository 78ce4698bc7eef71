"""Warnings that point at a line of the calling program, however deep inside these packages the cause is found."""

from __future__ import annotations

import inspect
import warnings

# contextlib runs the end of our context managers, on behalf of the caller.
_BETWEEN = ("bridge", "jax_impl", "torch_impl", "contextlib")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Call ``warnings.warn`` for the innermost frame outside these packages, or else for the outermost frame."""
    # Python 3.12 has skip_file_prefixes for this.
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
