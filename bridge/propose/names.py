"""Names of tensors across code bases: families by layer number, and words with one meaning.

model.layers.7.self_attn.q_proj.weight   family model.layers.{i}.self_attn.q_proj.weight
                                         words  attention query weight
layers/7/attention/query/kernel          family layers/{i}/attention/query/kernel
                                         words  attention query weight
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.core.formats.tensors.base import TensorInfo

INDEX_NAMES = ("{i}", "{j}", "{k}", "{l}")

_LAYER = frozenset({"layer", "layers", "h", "block", "blocks", "encoderblock", "resblocks"})
_LIGHT = 0.2

# If one of these is the gate projection, a module called `gate` chooses experts.
_OTHER_GATES = frozenset({"w1", "gate_proj", "wi_0", "gate_up_proj"})

_WORDS: Mapping[str, str] = {
    word: meaning
    for meaning, words in tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8")).items()
    for word in words.split()
}
"""The words of a component of a path, by the component in lower case."""
# Parameters that torch's own modules register directly, not as the `weight` of an inner module.
_ATTENTION = re.compile(r"in_proj_(weight|bias)|([qkv])_proj_(weight)|(bias)_([kv])")
_RECURRENT = re.compile(r"(weight|bias)_(ih|hh|hr)(?:_l([0-9]+)(_reverse)?)?")
_LETTERS = {"q": "query", "k": "key", "v": "value"}
_READS = {"ih": "input", "hh": "hidden", "hr": "projection"}
_AUTOMATIC = re.compile(r"[A-Z][A-Za-z0-9]*")
"""The class in linen's automatic names, such as `Dense_0`."""

FUSED_WORDS = (("query", "key", "value"), ("gate", "up"), ("key", "value"))
"""Parts that are often stored as one tensor, in the usual order."""
_MAX_PAIRS = 20_000


@dataclass(frozen=True, eq=False)
class Family:
    """Tensors of one shape and dtype whose names differ only in numbers. ``path`` has INDEX_NAMES for the numbers.

    members: name of each tensor without the tree's root, by its numbers. words: see the module's docstring.
    """

    path: str
    members: Mapping[tuple[int, ...], TensorInfo]
    words: frozenset[str]
    leaf: str

    @property
    def plain_name(self) -> tuple[str, ...]:
        """The path without the tensor's own name, and without modules that only contain others."""
        parts = [part.lower() for part in re.split(r"[./]", self.path)[:-1]]
        return tuple(part for part in parts if _WORDS.get(part, part))

    @property
    def own_parts(self) -> tuple[tuple[str, ...], ...]:
        """Parts that torch's own modules concatenate in this tensor, in torch's order; names as in flax's cells."""
        if self.leaf in ("in_proj_weight", "in_proj_bias"):
            return (("query", "key", "value"),)
        recurrent = _RECURRENT.fullmatch(self.leaf)
        if recurrent is None or recurrent[2] == "hr":
            return ()
        return tuple(tuple(recurrent[2][0] + gate for gate in gates) for gates in ("ifgo", "rzn"))

    @property
    def info(self) -> TensorInfo:
        """Any of the tensors."""
        return next(iter(self.members.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each index the numbers that occur, sorted."""
        columns = zip(*self.members, strict=True)
        return tuple(tuple(sorted(set(column))) for column in columns)

    @property
    def complete(self) -> bool:
        """Whether every combination of numbers occurs."""
        return math.prod(map(len, self.numbers)) == len(self.members)


def families(weights: Mapping[str, TensorInfo], separator: str, *, automatic: bool = False) -> list[Family]:
    """Group tensors, given by name without the tree's root, in the order in which they come.

    automatic: whether the numbers in linen's automatic names are layer numbers.
    """
    grouped: dict[tuple[tuple[str, ...], tuple[int, ...], np.dtype], dict[tuple[int, ...], TensorInfo]] = {}
    present = {part for name in weights for part in name.split(separator)}
    for name, info in weights.items():
        pattern, numbers = pattern_of(name.split(separator), automatic)
        key = (pattern, info.shape, info.dtype)
        grouped.setdefault(key, {})[numbers] = info
    shapes = Counter(pattern for pattern, _, _ in grouped)
    by_pattern = []
    for (pattern, _, _), members in grouped.items():
        if shapes[pattern] > 1:
            # Numbers with different shapes are not a family: each tensor is a separate family.
            for numbers, info in members.items():
                parts = filled(pattern, numbers)
                words = _words_of(parts, present)
                by_pattern.append(Family(separator.join(parts), {(): info}, words, parts[-1]))
        else:
            words = _words_of(pattern, present)
            by_pattern.append(Family(separator.join(pattern), members, words, pattern[-1]))
    return by_pattern


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """The similarity of two names, from 0 to 1; words that nearly every name has count little."""
    both, either = _weigh(a & b), _weigh(a | b)
    return both / either if either and both > _LIGHT else 0.0


def _weigh(words: Iterable[str]) -> float:
    return sum(_LIGHT if word in ("weight", "bias") else 1.0 for word in words)


def leaf_word(leaf: str) -> str:
    """A tensor's role in its layer: `kernel` and `weight` are one word."""
    return _WORDS.get(leaf.lower(), leaf)


def pattern_of(parts: Sequence[str], automatic: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The parts of a name with INDEX_NAMES for the numbers of layers, and these; automatic: see `families`."""
    pattern: list[str] = []
    numbers: list[int] = []
    for part in parts:
        match = re.fullmatch(r"(?:([A-Za-z][A-Za-z0-9]*)_)?(0|[1-9][0-9]{0,8})", part)
        stem = match and match[1]
        # wi_0 and wi_1 are two matrices, layers_0 and layers_1 two layers.
        layers = stem is None or stem.lower() in _LAYER or (automatic and _AUTOMATIC.fullmatch(stem))
        if match and len(numbers) < len(INDEX_NAMES) and layers:
            pattern.append(f"{stem}_{INDEX_NAMES[len(numbers)]}" if stem else INDEX_NAMES[len(numbers)])
            numbers.append(int(match[2]))
        else:
            pattern.append(part)
    return tuple(pattern), tuple(numbers)


def filled(pattern: Sequence[str], numbers: Sequence[int]) -> tuple[str, ...]:
    """The parts of a name with the numbers of its layers."""
    values = dict(zip(INDEX_NAMES, map(str, numbers), strict=False))
    return tuple(re.sub(r"\{\w\}", lambda match: values[match.group()], part) for part in pattern)


def _own_words(part: str, present: Set[str]) -> list[str]:
    """The words of a parameter that one of torch's own modules registers directly; none for other names."""
    attention, recurrent = _ATTENTION.fullmatch(part), _RECURRENT.fullmatch(part)
    if attention is not None:
        if attention[1]:
            return ["query", "key", "value", attention[1]]
        if attention[2]:
            return [_LETTERS[attention[2]], "weight"]
        return [_LETTERS[attention[5]], "extra", "bias"]
    if recurrent is None:
        return []
    words = [recurrent[1], _READS[recurrent[2]]]
    if int(recurrent[3] or 0):
        words.append(f"layer{recurrent[3]}")
    both = any(name.endswith("_reverse") and _RECURRENT.fullmatch(name) for name in present)
    return words + (["reverse"] if recurrent[4] else ["forward"] if both else [])


def _words_of(parts: Sequence[str], present: Set[str]) -> frozenset[str]:
    words: list[str] = []
    inside = False
    for part in parts:
        plain = re.sub(r"_?\{\w\}$", "", part).lower()
        inside = inside or part in INDEX_NAMES or part != re.sub(r"_?\{\w\}$", "", part)
        if plain == "post_attention_layernorm" and "pre_feedforward_layernorm" in present:
            words += ["attention", "post", "norm"]
        elif plain == "gate" and present & _OTHER_GATES:
            words.append("router")
        elif plain in ("wo", "c_proj"):
            words.append("down" if "mlp" in words else "out")
        elif own := _own_words(part, present):
            words += own
        elif plain in _WORDS:
            words += _WORDS[plain].split()
        else:
            for piece in re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower()):
                words += _WORDS.get(piece, piece).split()
    if not inside and "norm" in words and not {"attention", "mlp", "embed"} & set(words):
        words.append("final")
    return frozenset(word for word in words if word not in ("i", "j", "k", "l") or len(word) > 1)


def parts_named(side: Sequence[Family], names: Sequence[str]) -> list[list[Family]]:
    """For each name of a part, the families that may be it; families that name several of the parts are excluded."""
    parts = [family for family in side if len(family.words.intersection(names)) == 1]
    return [[part for part in parts if name in part.words] for name in names]


def most_alike(whole: Family, name: str, parts: Sequence[Family]) -> Family | None:
    """The family in ``parts`` whose name is nearest to the part ``name`` of ``whole``."""
    wanted = as_part(whole, name)
    return max(parts, key=lambda part: similarity(part.words, wanted), default=None)


def as_part(whole: Family, name: str) -> frozenset[str]:
    """The words that a part of ``whole`` would have under the same name."""
    return (whole.words - {word for words in FUSED_WORDS for word in words}) | {name}


def comparable(a: Sequence[Family], b: Sequence[Family]) -> Iterator[tuple[Family, Family]]:
    """Pairs with equally many elements; if there are too many to try, only those with the same words."""
    sizes: dict[int, tuple[list[Family], list[Family]]] = {}
    for side, several in enumerate((a, b)):
        for family in several:
            sizes.setdefault(family.info.numel * len(family.members), ([], []))[side].append(family)
    for left, right in sizes.values():
        if len(left) * len(right) <= _MAX_PAIRS:
            yield from itertools.product(left, right)
        else:
            by_words: dict[frozenset[str], list[Family]] = {}
            for y in right:
                by_words.setdefault(y.words, []).append(y)
            yield from itertools.islice(((x, y) for x in left for y in by_words.get(x.words, ())), _MAX_PAIRS)
