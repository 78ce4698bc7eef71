"""Which dimension of a parameter a style of ``[[parallel]]`` cuts, by the kind of parameter.

"colwise" cuts output features, "rowwise" input features, "expert" dimension 0 of every parameter::

    kind                                                 colwise     rowwise
    linear        of PyTorch: (out, in)                  0           1
    kernel        of JAX: (in, out), (in, heads, d)      1           0
                  (heads, d, out)                                    0
    convolution   of JAX: (..., in, out)                 last        last but one
    embedding     (tokens, features)                     1           0
    bias          and every other vector                 0           whole
"""

from __future__ import annotations

from typing import Final

FEATURE_STYLES: Final = ("colwise", "rowwise")
"""Styles that cut features, and imply a computation on parts of the features."""
_OF_COLWISE: Final = {"linear": 0, "kernel": 1, "embedding": 1}


def styled_dimension(style: str, kind: str, ndim: int) -> int | None:
    """The dimension to cut for a parameter of ``ndim`` dimensions; None if it stays whole."""
    if style == "expert":
        return 0
    if kind == "bias" or ndim < 2:
        return 0 if style == "colwise" else None
    if kind == "convolution":
        return ndim - 1 if style == "colwise" else ndim - 2
    return _OF_COLWISE[kind] if style == "colwise" else 1 - _OF_COLWISE[kind]
