"""Naming conventions: how a code base calls its weights, and where it keeps what belongs to them.

    torch        model.<w>      optimizer.state.<w>.exp_avg    ...exp_avg_sq    ...step (each)
    jax          params/<w>     opt_state/mu/<w>               opt_state/nu/<w>      opt_state/count (one)
    flax         params/<w>     opt_state/0/mu/<w>             (optax.adamw is a chain, the moments are in part 0)
    hf           <w>            optimizer.state.<w>.exp_avg    ...

A convention whose weights have "/" in their names is a tree: each part is a key. In the others a weight's dotted name
is one key, as in PyTorch's state dicts. Names of tensors are compared as tree paths, whatever the file format: joined
by "/" or by ".".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from bridge.formats.base import TreePath
from bridge.mapping.errors import MappingError

Section = Literal["weights", "exp_avg", "exp_avg_sq", "step"]
SECTIONS: tuple[Section, ...] = ("weights", "exp_avg", "exp_avg_sq", "step")
MOMENTS: tuple[Section, ...] = ("exp_avg", "exp_avg_sq")
WEIGHT = "{w}"

_FLAT = {
    "weights": "model.{w}",
    "exp_avg": "optimizer.state.{w}.exp_avg",
    "exp_avg_sq": "optimizer.state.{w}.exp_avg_sq",
    "step": "optimizer.state.{w}.step",
}
_TREE = {
    "weights": "params/{w}",
    "exp_avg": "opt_state/mu/{w}",
    "exp_avg_sq": "opt_state/nu/{w}",
    "step": "opt_state/count",
}


@dataclass(frozen=True)
class Convention:
    """One naming convention of a mapping.

    separator: "/" or ".", what joins the parts of its names. format: the format it usually lives in. places: for each
    section the full name of a weight's tensor, `{w}` standing for the weight; `step` without it is one for all.
    MappingError when a place is malformed.
    """

    name: str
    separator: str
    format: str
    places: Mapping[Section, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = _TREE if self.separator == "/" else _FLAT
        unknown = sorted(set(self.places) - set(SECTIONS))
        if unknown:
            raise MappingError(
                f"expected places of {', '.join(SECTIONS)} in convention {self.name}, got {', '.join(unknown)}"
            )
        places = {section: self.places.get(section, defaults[section]) for section in SECTIONS}
        for section, place in places.items():
            if place.count(WEIGHT) != 1 and (section != "step" or WEIGHT in place):
                raise MappingError(
                    f"expected {WEIGHT} once in the place of {section} of convention {self.name}, got {place!r}"
                )
        object.__setattr__(self, "places", MappingProxyType(places))

    @property
    def one_step(self) -> bool:
        """Whether one step count serves all weights."""
        return WEIGHT not in self.places["step"]

    def name_of(self, section: Section, weight: str = "") -> str:
        """The name of a weight's tensor, or of the one step count."""
        return self.places[section].replace(WEIGHT, weight)

    def path_of(self, section: Section, weight: str = "") -> TreePath:
        """The tree path. Numbers outside of a weight's name are positions in a list, as in ("opt_state", 0, "mu")."""
        before, _, after = self.places[section].partition(WEIGHT)
        middle = tuple(weight.split("/")) if self.separator == "/" else (weight,)
        return (*self._keys(before), *(middle if weight else ()), *self._keys(after))

    def joined(self, path: TreePath) -> str:
        """A tree path as this convention writes names."""
        return self.separator.join(map(str, path))

    def at(self, places: Mapping[Section, str]) -> Convention:
        """The same with other places."""
        return Convention(self.name, self.separator, self.format, {**self.places, **places})

    def _keys(self, text: str) -> TreePath:
        parts = [part for part in text.split(self.separator) if part]
        return tuple(int(p) if p.isdecimal() and self.separator == "/" else p for p in parts)
