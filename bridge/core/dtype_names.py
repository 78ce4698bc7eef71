"""The dtypes of weights and checkpoints: their names, which PyTorch, NumPy and ml_dtypes share, and their bytes.

Also the names that people and XLA use for these dtypes: ``bf16``, ``half``, ``torch.bfloat16``, ``F8_E4M3``.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Final

FLOATING: Final = ("float32", "bfloat16", "float16", "float64")
"""Dtypes in which weights are trained."""
BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict(zip(FLOATING, (4, 2, 2, 8), strict=True)),
        **{f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)},
        **{"bool": 1, "complex64": 8, "complex128": 16},
    }
)
"""Dtypes that models compute with, and the bytes per element."""
FLOAT8: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
"""The float8 dtypes that both PyTorch and JAX have."""
NARROW_INTEGERS: Final = ("int4", "int2")
ONLY_JAX: Final = (*NARROW_INTEGERS, "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz")
"""Dtypes that only JAX has; in memory each element takes one byte."""

_SHORT = {
    "double": "float64",
    # "float" as PyTorch means it; NumPy and Python mean float64.
    "float": "float32", "single": "float32", "half": "float16", "brain": "bfloat16", "long": "int64",
    "short": "int16", "byte": "uint8", "char": "int8", "boolean": "bool", "pred": "bool", "c64": "complex64",
    "c128": "complex128", "cfloat": "complex64", "cdouble": "complex128",
    # In both PyTorch and safetensors, the float8 with 4 exponent and 3 mantissa bits is the finite variant.
    "float8_e4m3": "float8_e4m3fn",
    "float8_e8m0": "float8_e8m0fnu",
    "float4_e2m1": "float4_e2m1fn",
    "float4": "float4_e2m1fn",
}  # fmt: skip
_BITS = {
    **{f"{prefix}{bits}": f"float{bits}" for prefix in ("f", "fp") for bits in (16, 32, 64)},
    **{prefix + "16": "bfloat16" for prefix in ("bf", "bfp", "b")},
    **{f"{prefix}{bits}": f"int{bits}" for prefix in ("i", "s") for bits in (2, 4, 8, 16, 32, 64)},
    **{f"{prefix}{bits}": f"uint{bits}" for prefix in ("u", "ui") for bits in (8, 16, 32, 64)},
}
_MODULES = ("torch.", "jnp.", "jax.numpy.", "np.", "numpy.", "ml_dtypes.", "dtypes.", "tf.")


def full_name(text: str, known: Container[str] = ()) -> str:
    """The name that PyTorch and NumPy use for the dtype that ``text`` means; ``text`` itself if no such dtype is known.

    Names in ``known`` are returned unchanged. Case and a module prefix do not matter. ``fp8`` alone means no dtype,
    since there are several.
    """
    if text in known:
        return text
    name = text.strip().lower().replace("-", "_")
    for module in _MODULES:
        name = name.removeprefix(module)
    if name in known:
        return name
    for width in ("8", "4"):
        # f8e4m3, fp8_e4m3fn, F8_E5M2, float8e5m2, e4m3
        for prefix in (f"float{width}", f"fp{width}", f"f{width}"):
            rest = name.removeprefix(prefix).removeprefix("_")
            if name.startswith(prefix) and rest.startswith("e"):
                name = f"float{width}_{rest}"
    if name.startswith("e") and "m" in name:
        name = f"float{4 if name.startswith('e2m1') else 8}_{name}"
    name = _BITS.get(name, name)
    name = _SHORT.get(name, name)
    looks_right = name.startswith(("float", "bfloat", "int", "uint", "complex", "bool"))
    return name if looks_right and (not known or name in known) else text


def hint(text: str, known: Iterable[str]) -> str:
    """The end of a sentence, with the names in ``known`` that are nearest to ``text``; empty if no name is near."""
    name = full_name(text)
    if name in ("fp8", "f8", "float8"):
        near = [suggestion for suggestion in known if suggestion in ("float8_e4m3fn", "float8_e5m2")]
    else:
        near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(near)}?" if near else ""
