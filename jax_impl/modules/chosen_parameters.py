"""Find the parameters that an option names by path patterns or by an nnx filter."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax import nnx

from jax_impl.modules.module_tree import joined, parameter_leaves

Chosen = Sequence[str] | Callable[[tuple[Any, ...], Any], bool] | type[nnx.Variable]


def chosen_parameters(model: nnx.Module, chosen: Chosen, option: str) -> frozenset[str]:
    """Paths of parameters. Raises ``ValueError`` that names the ``option`` if a pattern or a filter matches nothing.

    Raises ``TypeError`` for anything except patterns or a filter.
    """
    if isinstance(chosen, str):
        raise TypeError(
            f"{option}: expected a list of patterns, or an nnx filter, got one string: use [{chosen!r}]"
        )
    if callable(chosen) or isinstance(chosen, type):
        matches = nnx.filterlib.to_predicate(chosen)
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        taken = frozenset(joined(key) for key, variable in flat if matches(key, variable))
        if not taken:
            raise ValueError(
                f"{option}: expected a filter of parameters, but {chosen!r:.120} matches none of "
                f"{[joined(key) for key, _ in flat][:12]}; omit the option to choose none"
            )
        return taken
    patterns: tuple[Any, ...] = tuple(chosen) if isinstance(chosen, Iterable) else (chosen,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option}: expected a list of patterns, or an nnx filter, got {chosen!r}")
    parameters = list(parameter_leaves(model))
    paths: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            raise ValueError(
                f"{option}: expected patterns of parameter paths, but {pattern!r} matches none of {parameters[:12]}"
            )
        paths.update(matching)
    return frozenset(paths)
