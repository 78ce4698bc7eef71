"""Warnings that point at a line of the program that uses these packages, however deep in them the cause is found."""

from __future__ import annotations

import inspect
import warnings

# contextlib runs what ends a context manager of ours, in the caller's name.
_BETWEEN = ("bridge", "jax_impl", "torch_impl", "contextlib")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn`` from the innermost frame that is not of these packages, or else the outermost."""
    # Python 3.12 has skip_file_prefixes for it.
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
