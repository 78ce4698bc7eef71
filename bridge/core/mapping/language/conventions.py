"""Naming conventions: how a code base names its weights, and where it keeps their optimizer state.

    torch        model.<w>      optimizer.state.<w>.exp_avg    ...exp_avg_sq    ...step (each)
    jax          params/<w>     opt_state/mu/<w>               opt_state/nu/<w>      opt_state/count (one)
    flax         params/<w>     opt_state/0/mu/<w>             (optax.adamw is a chain, the moments are in part 0)
    hf           <w>            optimizer.state.<w>.exp_avg    ...

A convention whose weights have "/" in their names is a tree: each part is a key. In other conventions, a weight's
dotted name is one key, as in PyTorch's state dicts. Names of tensors are compared as tree paths, whatever the file
format: joined by "/" or by ".".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from bridge.core.formats.tensors.base import TreePath
from bridge.core.mapping.language.errors import MappingError

Moment = Literal["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"]
Scale = Literal["exp_avg_scale", "exp_avg_sq_scale", "max_exp_avg_sq_scale", "momentum_buffer_scale"]
Section = Literal["weights", Moment, Scale, "step"]
ADAM: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")
MOMENTS: tuple[Moment, ...] = (*ADAM, "max_exp_avg_sq", "momentum_buffer")
SCALES: Mapping[Moment, Scale] = MappingProxyType(
    {
        "exp_avg": "exp_avg_scale",
        "exp_avg_sq": "exp_avg_sq_scale",
        "max_exp_avg_sq": "max_exp_avg_sq_scale",
        "momentum_buffer": "momentum_buffer_scale",
    }
)
"""Sections for the scales of moments that are stored in float8 or float16 (`scales.py`)."""

BY_WEIGHT: tuple[Section, ...] = (*MOMENTS, *SCALES.values())
"""Optimizer state that has one value for each element or row of a weight."""

SECTIONS: tuple[Section, ...] = ("weights", *BY_WEIGHT, "step")
_FLAT = frozenset({"dcp", "safetensors"})
_AS_ORBAX = {"npz": "orbax", "msgpack": "orbax"}
_OWN = frozenset({"jax", "flax"})
WEIGHT = "{w}"
MODEL_WEIGHTS = f"model.{WEIGHT}"

_OPTAX: Mapping[Moment, str] = MappingProxyType(
    {"exp_avg": "mu", "exp_avg_sq": "nu", "max_exp_avg_sq": "nu_max", "momentum_buffer": "trace"}
)
_WORDS: dict[Section, str] = {moment: _OPTAX[moment] for moment in MOMENTS}
_WORDS |= {SCALES[moment]: f"{word}_scale" for moment, word in _OPTAX.items()}
WORDS: Mapping[Section, str] = MappingProxyType(_WORDS)
"""Optax's names of the moments, and our optimizers' names of the scales."""

POWERS: Mapping[Section, int] = MappingProxyType(
    {"weights": 1, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "momentum_buffer": -1}
)
"""How a section's values change with a factor on a weight: gradients are divided by it. Scales like their moments."""


@dataclass(frozen=True)
class State:
    """The places of one optimizer state, by section. weights: names of the weights that it covers; None: all."""

    places: Mapping[Section, str]
    weights: frozenset[str] | None = None


@dataclass(frozen=True)
class Convention:
    """One naming convention of a mapping.

    separator: "/" or ".", between the parts of its names. format: its usual file format, "" for none.
    places: for each section the full name of a weight's tensor, with `{w}` for the weight. A `step` without `{w}` is
    one count for all weights. In a tree a number is a position in a list, and a quoted number ('0') is a key. states:
    the places of optimizer states, if there are several or if they differ from `places`. without: whether it equals
    another convention without a prefix of its names: a model without its heads.

    Raises MappingError when a place is malformed.
    """

    name: str
    separator: str
    format: str
    places: Mapping[Section, str] = field(default_factory=dict)
    states: tuple[State, ...] = ()
    without: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.places) - set(SECTIONS))
        if unknown:
            raise MappingError(
                f"expected places of {', '.join(SECTIONS)} in convention {self.name}, got {', '.join(unknown)}"
            )
        places = {**self._usual(), **self.places}
        for section, prefix in (
            item for p in (places, *(s.places for s in self.states)) for item in p.items()
        ):
            if prefix.count(WEIGHT) != 1 and (section != "step" or WEIGHT in prefix):
                raise MappingError(
                    f"expected {WEIGHT} once in the place of {section} of convention {self.name}, got {prefix!r}"
                )
        object.__setattr__(self, "places", MappingProxyType(places))
        if not self.states:
            usual: dict[Section, str] = {
                section: prefix for section, prefix in places.items() if section != "weights"
            }
            object.__setattr__(self, "states", (State(MappingProxyType(usual)),))

    def _usual(self) -> dict[Section, str]:
        if not self.is_tree:
            kept = {s: f"optimizer.state.{WEIGHT}.{s}" for s in (*BY_WEIGHT, "step")}
            return {"weights": MODEL_WEIGHTS, **kept}
        first = self.places.get("exp_avg", f"opt_state/mu/{WEIGHT}")
        node, word, rest = first.rpartition("mu/")
        return {"weights": f"params/{WEIGHT}", **tree_places(node if word else "opt_state/", rest, "")}

    @property
    def is_tree(self) -> bool:
        """Whether each part of a weight's name is a key."""
        return self.separator == "/"

    @property
    def one_step(self) -> bool:
        """Whether one step count serves all weights of a state."""
        return WEIGHT not in self.places["step"]

    def name_of(self, section: Section, weight: str = "", state: int = 0) -> str:
        """The name of a weight's tensor, or of the one step count."""
        return self.joined(self.path_of(section, weight, state))

    def path_of(self, section: Section, weight: str = "", state: int = 0) -> TreePath:
        """The tree path. Numbers outside a weight's name are positions in a list, as in ("opt_state", 0, "mu")."""
        prefix = self.places["weights"] if section == "weights" else self.states[state].places[section]
        before, _, after = prefix.partition(WEIGHT)
        middle = tuple(weight.split("/")) if self.is_tree else (weight,)
        return (*self._keys(before), *(middle if weight else ()), *self._keys(after))

    def state_of(self, weight: str) -> int:
        """The state of a weight: the first state that names the weight, else the first."""
        return next((k for k, s in enumerate(self.states) if s.weights and weight in s.weights), 0)

    def joined(self, path: TreePath) -> str:
        """The name of a tree path in this convention."""
        return self.separator.join(map(str, path))

    def written(self, path: TreePath) -> str:
        """A tree path as a place or a part of one, with quotes around keys that are numbers."""
        return self.separator.join(f"'{k}'" if self._looks_like_position(k) else str(k) for k in path)

    def at(self, weights: str, states: tuple[State, ...]) -> Convention:
        """The same convention with other places."""
        return replace(self, places={**self.places, "weights": weights}, states=states)

    def _looks_like_position(self, key: str | int) -> bool:
        return self.is_tree and isinstance(key, str) and key.isdecimal()

    def _keys(self, text: str) -> TreePath:
        parts = [part for part in text.split(self.separator) if part]
        if not self.is_tree:
            return tuple(parts)
        return tuple(int(part) if part.isdecimal() else part.strip("'") for part in parts)


def usual_in(format: str, conventions: Sequence[Convention]) -> list[Convention]:
    """The ``conventions`` to expect in a checkpoint of this format; only one, if that is clear.

    Among several trees, the one with the names of our own models. In read-only formats, which are only compared, trees
    are named as in Orbax, and state dicts as in the flat formats.
    """
    fitting = [c for c in conventions if c.format == _AS_ORBAX.get(format, format)]
    if not fitting and format in _FLAT | {"torch"}:
        fitting = [c for c in conventions if c.format in _FLAT]
    own = [c for c in fitting if c.name in _OWN]
    return own if len(own) == 1 else fitting


def path_of_scales(path: TreePath) -> TreePath | None:
    """Where the scales of the moment at this path are, if it has some; None for a path that is not a moment's."""
    before, dot, last = str(path[-1]).rpartition(".")
    for moment, word in _OPTAX.items():
        if last == moment:
            return (*path[:-1], f"{before}{dot}{SCALES[moment]}")
        if word in path[:-1]:
            position = len(path) - 1 - path[::-1].index(word)
            return (*path[:position], WORDS[SCALES[moment]], *path[position + 1 :])
    return None


def tree_places(node: str, before: str, after: str) -> dict[Section, str]:
    """The places of an optax state: ``node`` comes before mu, nu and count; ``before`` between mu and the weight.

    before: with or without ``{w}`` itself. after: the text after a weight, and after count.
    """
    middle = before if WEIGHT in before else before + WEIGHT
    places: dict[Section, str] = {s: f"{node}{word}/{middle}{after}" for s, word in WORDS.items()}
    return {**places, "step": f"{node}count{after}"}
