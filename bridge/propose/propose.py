"""A proposal for a mapping between two checkpoints, from their names and shapes and, optionally, their values.

    families    layers.0.wq.weight, layers.1.wq.weight, ...  ->  layers.{i}.wq.weight
    fits        which family can contain the elements of which, and in what order of axes (`axes.py`)
    names       among fits, the pair whose names have most in common (`names.py`)

If other families would have fitted as well, the rule carries a doubt that names them. Comparing values settles doubts
if both checkpoints contain the same weights.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.checkpoints.ground.selection import STATE_ROOTS, WEIGHT_ROOTS
from bridge.core.formats import items_of_each, open_checkpoint
from bridge.core.formats.stores.store import place_of
from bridge.core.formats.tensors.base import CheckpointReader, TensorInfo
from bridge.core.formats.tensors.leaves import TREE_FORMATS
from bridge.core.formats.whole.step_paths import Step, each_at_step
from bridge.core.mapping.language.conventions import WEIGHT
from bridge.core.mapping.language.rules import parse_mapping
from bridge.core.text import first_of
from bridge.propose.axes import Fit, fits, fused_fits
from bridge.propose.layer_series import BY_ORDER, BY_SIZES, by_order, numbered_alike
from bridge.propose.names import (
    FUSED_WORDS,
    Family,
    as_part,
    comparable,
    families,
    most_alike,
    parts_named,
    similarity,
)
from bridge.propose.own_modules import COUNTER, FLIPPED, in_usual_order, is_known_layout, may_be_flipped
from bridge.propose.text import Namer, Places, ProposedRule, conventions, places_in, render, writable
from bridge.propose.uneven import settled
from bridge.propose.values import Evidence

_MAX_LEFT = 24
_LOOSE = frozenset({"gate", "up", "down", "router", "norm", "post", "mlp"})
"""Ambiguous words: in some code bases `w1` is a gate, in others an up-projection."""
_ROTARY = "rotary layouts (halves or pairs of rows) cannot be told from names and shapes"


@dataclass(frozen=True)
class Proposal:
    """A mapping as TOML text, and its doubts, which a person should review before using the mapping.

    left_a, left_b: weights that no rule names. places: where each side stores its weights and optimizer states. doubts:
    the number of doubts of all rules and places. A mapping without doubts and remaining weights needed no guess.
    """

    a: Path | str
    b: Path | str
    text: str
    rules: tuple[ProposedRule, ...]
    left_a: tuple[str, ...]
    left_b: tuple[str, ...]
    places: tuple[Places, Places]

    @property
    def doubts(self) -> int:
        uncertain_places = sum(bool(place.doubt) for place in self.places)
        return sum(len(rule.doubts) for rule in self.rules) + uncertain_places

    @property
    def certain(self) -> bool:
        """Whether the mapping can be used without a review."""
        return not (self.doubts or self.left_a or self.left_b)


@dataclass(frozen=True)
class _Choice:
    fit: Fit
    doubts: tuple[str, ...]


def propose(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    items: Sequence[str] = (),
    step: Step | None = None,
) -> Proposal:
    """Propose rules that pair the weights of two checkpoints of any formats. Optimizer state follows its weights.

    values: compare a few elements of each candidate. items, step: for checkpoints with items or steps, see
    `open_checkpoint`. Raises FileNotFoundError, or CheckpointError if one is damaged.
    """
    a, b = each_at_step((a, b), step)
    items_a, items_b = items_of_each((a, b), items)
    with open_checkpoint(a, items=items_a) as reader_a, open_checkpoint(b, items=items_b) as reader_b:
        (left, place_a), (right, place_b) = _weights(reader_a), _weights(reader_b)
        for side, other in ((0, right), (1, left)):
            named, _ = _weights((reader_a, reader_b)[side], automatic=True)
            # Numbers that the other side also has are layer numbers; others may belong to different modules.
            if numbered_alike(named, other):
                left, right = (named, right) if side == 0 else (left, named)
        left, right = by_order(left, right)
        # Only torch's norms count batches.
        counted = [any(family.leaf == COUNTER for family in side) for side in (left, right)]
        drop = [f"*{COUNTER}"] if counted[0] != counted[1] else []
        if drop:
            left, right = ([member for member in side if member.leaf != COUNTER] for side in (left, right))
        # Names that no rule can express must not get into the file.
        usable_a, usable_b = ([family for family in side if writable(family.path)] for side in (left, right))
        matcher = _Matcher(usable_a, usable_b, Evidence(reader_a, reader_b) if values else None)
        choices = matcher.run()
        used_a = {entry.family.path for choice in choices for entry in choice.fit.a}
        used_b = {entry.family.path for choice in choices for entry in choice.fit.b}
        namer = Namer(left + right)
        rules = settled([ProposedRule.of(choice.fit, choice.doubts, namer) for choice in choices])
        order = {family.path: number for number, family in enumerate(left)}
        rules.sort(key=lambda rule: order[rule.fit.a[0].family.path])
        left_a = tuple(family.path for family in left if family.path not in used_a)
        left_b = tuple(family.path for family in right if family.path not in used_b)
        places = Places(), Places()
        if rules:
            keys = conventions(reader_a.format, reader_b.format)
            plain = render(reader_a, reader_b, rules, left_a, left_b, namer, drop=drop)
            mapping = parse_mapping(plain, "proposed")
            place_of_a = places_in(reader_a, mapping, keys[0], place_a)
            places = place_of_a, places_in(reader_b, mapping, keys[1], place_b)
        text = render(reader_a, reader_b, rules, left_a, left_b, namer, places, drop)
        return Proposal(place_of(a), place_of(b), text, tuple(rules), left_a, left_b, places)


def _weights(reader: CheckpointReader, *, automatic: bool = False) -> tuple[list[Family], str]:
    """The families of a checkpoint's weights, and the place: the text before and after their names."""
    infos = list(reader.tensors.values())
    # Flat names, such as Hugging Face's, are single keys in an Orbax tree.
    nested = reader.format in TREE_FORMATS and any(len(info.path) > 1 for info in infos)
    separator = "/" if nested else "."
    named = {separator.join(map(str, info.path)): info for info in infos}
    roots = {name.split(separator)[0] for name in named}
    for root in sorted(roots & WEIGHT_ROOTS):
        # As in {"model": {"layers.0.w": ...}, "optimizer": ...}; Hugging Face models also have weights next to `model`.
        # Their files contain only a model, so `model` belongs to the weights' names there.
        alone = reader.format == "safetensors" and roots == {root}
        if roots - {root} <= STATE_ROOTS and not alone:
            named = {n: info for n, info in named.items() if n.split(separator)[0] == root}
            return _placed(named, root + separator, separator, automatic)
    weights = {n: info for n, info in named.items() if n.split(separator)[0] not in STATE_ROOTS}
    return _placed(weights, "", separator, automatic)


def _placed(
    named: dict[str, TensorInfo], before: str, separator: str, automatic: bool
) -> tuple[list[Family], str]:
    """Families without the common prefix of all names, and without the key under which nnx stores every value."""
    below = {name.removeprefix(before): info for name, info in named.items()}
    after = "/value" if separator == "/" and all(name.endswith("/value") for name in below) else ""
    weights = {name.removesuffix(after): info for name, info in below.items()}
    return families(weights, separator, automatic=automatic), f"{before}{WEIGHT}{after}"


class _Matcher:
    """Pairs the families of two sides, the most similar first."""

    def __init__(self, a: Sequence[Family], b: Sequence[Family], evidence: Evidence | None) -> None:
        self._free_a, self._free_b = ({family.path: family for family in side} for side in (a, b))
        self._a, self._b = tuple(a), tuple(b)
        self._evidence = evidence
        self._fits: dict[tuple[str, str], list[Fit]] = {}
        self._partners_of_a: dict[str, list[Family]] = {}
        self._partners_of_b: dict[str, list[Family]] = {}
        self._pairs: list[tuple[Family, Family]] = []
        for x, y in comparable(a, b):
            if pair_fits := fits(x, y):
                self._pairs.append((x, y))
                self._fits[x.path, y.path] = pair_fits
                self._partners_of_a.setdefault(x.path, []).append(y)
                self._partners_of_b.setdefault(y.path, []).append(x)
        self._turning = self._usual_turns()
        # Learned positions are added to the tokens: then queries and keys are not rotated.
        self._rotary = not any("position" in family.words for family in (*a, *b))

    def run(self) -> list[_Choice]:
        """All pairs; each family is in at most one."""
        choices = self._fused_by_name()
        for x, y in sorted(
            self._pairs, key=lambda pair: (not self._agree(*pair), -similarity(pair[0].words, pair[1].words))
        ):
            if x.path not in self._free_a or y.path not in self._free_b:
                continue
            likeness, rivals = similarity(x.words, y.words), self._rivals(x, y)
            agreed = self._agree(x, y)
            if not likeness and rivals and not agreed:
                continue
            fit, doubts = self._settle(self._fits[x.path, y.path])
            ordered = any(word.startswith(BY_ORDER) for word in x.words & y.words)
            only = any(word.startswith(BY_SIZES) for word in x.words & y.words)
            if rivals and not only and not self._same_name(x, y):
                source = "order" if ordered else "name"
                doubts.append(f"by {source} only: {first_of(rivals)} would fit as well")
            elif not likeness and not agreed and x.path.replace(".", "/") != y.path.replace(".", "/"):
                doubts.append("by shape only: the names have nothing in common")
            choices.append(self._take(fit, doubts))
        return choices + self._fused_by_shape()

    def _take(self, fit: Fit, doubts: Sequence[str]) -> _Choice:
        for entry in fit.a:
            del self._free_a[entry.family.path]
        for entry in fit.b:
            del self._free_b[entry.family.path]
        return _Choice(fit, tuple(doubts))

    def _agree(self, x: Family, y: Family) -> bool:
        """Whether the values show that the two families belong together."""
        return self._evidence is not None and any(map(self._evidence.agrees, self._fits[x.path, y.path]))

    def _same_name(self, x: Family, y: Family) -> bool:
        """Whether the two have the same name, up to synonyms, and no other fitting family has it."""
        if self._evidence is not None or similarity(x.words, y.words) < 1:
            return False
        if x.plain_name != y.plain_name and (x.words | y.words) & _LOOSE:
            return False
        others = [*self._partners_of_a.get(x.path, ()), *self._partners_of_b.get(y.path, ())]
        return not any(other.words == x.words for other in others if other is not x and other is not y)

    def _rivals(self, x: Family, y: Family) -> list[str]:
        """Other families that fit either side of this pair, except those that values rule out."""
        on_b = [other for other in self._partners_of_a.get(x.path, ()) if other is not y]
        on_a = [other for other in self._partners_of_b.get(y.path, ()) if other is not x]
        if self._agree(x, y):
            on_b = [other for other in on_b if self._agree(x, other)]
            on_a = [other for other in on_a if self._agree(other, y)]
        return [family.path for family in on_b or on_a]

    def _settle(self, candidates: Sequence[Fit]) -> tuple[Fit, list[str]]:
        """The most common of several ways to store one family as another, and its doubts."""
        doubts = []
        agreed = False
        if self._evidence is not None:
            verdicts = [self._evidence.verdict(fit) for fit in candidates]
            agreed = "agree" in verdicts
            if agreed:
                candidates = [fit for fit in candidates if self._evidence.agrees(fit)]
            elif "same" in verdicts:
                doubts.append("all sampled elements are equal, which settles nothing")
            elif "unreadable" in verdicts:
                doubts.append("the elements cannot be read, which settles nothing")
            else:
                doubts.append("the sampled elements differ")
        known = [fit for fit in candidates if is_known_layout(fit, self._turning.get(_leaves(fit)))]
        if known and not agreed:
            candidates = known
        best = min(candidates, key=lambda fit: (self._unusual(fit), candidates.index(fit)))
        others = [fit for fit in candidates if fit is not best]
        if others:
            namer = Namer([*self._a, *self._b])
            doubts.append(f"also fits {first_of([ProposedRule.of(fit, (), namer).short for fit in others])}")
        words = best.a[0].family.words | best.b[0].family.words
        turned = self._rotary and not any(entry.family.own_parts for entry in (*best.a, *best.b))
        if words & {"query", "key"} and "norm" not in words and turned and not agreed:
            doubts.append(_ROTARY)
        if may_be_flipped(best) and not agreed:
            doubts.append(FLIPPED)
        return best, doubts

    def _unusual(self, fit: Fit) -> bool:
        leaves = _leaves(fit)
        usual = self._turning.get(leaves, "kernel" in leaves and leaves[0] != leaves[1])
        return bool(fit.turned) != usual

    def _usual_turns(self) -> dict[tuple[str, str], bool]:
        """For each pair of tensor kinds, whether axes are transposed between them if shapes leave no choice."""
        votes: dict[tuple[str, str], Counter[bool]] = {}
        for x, y in self._pairs:
            first, *others = self._fits[x.path, y.path]
            if not others and min(len(x.shape), len(y.shape)) > 1 and similarity(x.words, y.words) > 0.5:
                votes.setdefault((x.leaf, y.leaf), Counter())[bool(first.turned)] += 1
        return {leaves: count.most_common(1)[0][0] for leaves, count in votes.items()}

    def _fused_by_name(self) -> list[_Choice]:
        """Families named as several parts, such as `w13` or `qkv_proj`, with the families named as one of them."""
        wanted = [
            (whole, names, turned)
            for turned, wholes in ((False, self._a), (True, self._b))
            for whole in wholes
            for names in whole.own_parts or [n for n in FUSED_WORDS if whole.words.issuperset(n)]
        ]
        # Among several attentions, the one with the same name comes first: no part is in two wholes.
        wanted.sort(key=lambda candidate: -self._likeness(*candidate))
        choices = []
        for whole, names, turned in wanted:
            parts = self._parts(whole, names, turned)
            if None in parts or whole.path not in (self._free_b if turned else self._free_a):
                continue
            known = [part for part in parts if part is not None]
            # Values may show that the parts' order differs from the names' order.
            orders = itertools.permutations(known) if self._evidence is not None else [tuple(known)]
            possible = [fit for order in orders for fit in _fused(whole, order, turned)]
            if possible:
                rivals = self._other_parts(whole, names, known, turned)
                choices.append(self._take_fused(possible, "" if whole.own_parts else "names", rivals))
        return choices

    def _parts(self, whole: Family, names: Sequence[str], turned: bool) -> list[Family | None]:
        free = self._free_a if turned else self._free_b
        every = parts_named(self._a if turned else self._b, names)
        still_free = [[part for part in parts if part.path in free] for parts in every]
        return [most_alike(whole, name, parts) for name, parts in zip(names, still_free, strict=True)]

    def _likeness(self, whole: Family, names: Sequence[str], turned: bool) -> float:
        pairs = zip(names, self._parts(whole, names, turned), strict=True)
        return min(
            0.0 if part is None else similarity(part.words, as_part(whole, name)) for name, part in pairs
        )

    def _other_parts(
        self, whole: Family, names: Sequence[str], chosen: Sequence[Family], turned: bool
    ) -> list[str]:
        """Families that fit as well as the chosen parts, and whose names are as similar."""
        left = []
        every = parts_named(self._a if turned else self._b, names)
        for name, part, others in zip(names, chosen, every, strict=True):
            near = similarity(part.words, wanted := as_part(whole, name))
            alike = (other for other in others if other is not part and other.shape == part.shape)
            left += [other.path for other in alike if similarity(other.words, wanted) >= near]
        return left

    def _take_fused(self, joints: list[Fit], order: str, rivals: Sequence[str] = ()) -> _Choice:
        """``order``: the source of the parts' order; empty if the module's code defines it."""
        fit, doubts = self._settle(joints)
        entries = fit.b if len(fit.b) > 1 else fit.a
        shapes = [entry.family.shape for entry in entries]
        agreed = self._evidence is not None and self._evidence.agrees(fit)
        if len(set(shapes)) < len(shapes) and order and not agreed:
            doubts.append(f"parts of one shape: their order is taken from {order}")
        if rivals and not agreed:
            doubts.append(f"by name only: {first_of(rivals)} would fit as well")
        return self._take(fit, doubts)

    def _concatenations(self, whole: Family, parts: Sequence[Family], turned: bool) -> list[Fit]:
        """Orders of parts that shapes, values or names imply; a checkpoint's or alphabetical order implies nothing."""
        every = (fit for order in itertools.permutations(parts) for fit in _fused(whole, order, turned))
        if len({part.shape for part in parts}) == len(parts):
            return list(every)
        agreed = [fit for fit in every if self._evidence.agrees(fit)] if self._evidence is not None else []
        usual = in_usual_order(parts)
        return agreed or ([] if usual is None else _fused(whole, usual, turned))

    def _fused_by_shape(self) -> list[_Choice]:
        """Match remaining families that fit only a concatenation of two or three others."""
        choices: list[_Choice] = []
        for turned in (False, True):
            wholes, parts = (self._free_b, self._free_a) if turned else (self._free_a, self._free_b)
            if len(parts) > _MAX_LEFT:
                continue
            for whole in list(wholes.values()):
                several = [
                    joints
                    for count in (2, 3)
                    for chosen in itertools.combinations(parts.values(), count)
                    if (joints := self._concatenations(whole, chosen, turned))
                ]
                if len(several) == 1:
                    choice = self._take_fused(several[0], "names")
                    choices.append(replace(choice, doubts=("by shape only", *choice.doubts)))
        return choices


def _leaves(fit: Fit) -> tuple[str, str]:
    return fit.a[0].family.leaf, fit.b[0].family.leaf


def _fused(whole: Family, parts: Sequence[Family], swapped: bool) -> list[Fit]:
    possible = fused_fits(whole, parts) if len({part.path for part in parts}) == len(parts) else []
    return [fit.swapped() for fit in possible] if swapped else possible
