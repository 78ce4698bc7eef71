"""Tied weights: one parameter that some code bases store once, and others under two names.

    [[rule]]
    hf = "lm_head.weight : v m"
    flax = "lm_head/kernel : m v"
    optional = true
    tied_to = "model.embed_tokens.weight"      # a path of the rule whose tensor it shares

By default such a rule copies the tensors that the source has. With ``tied = "once"``, the two tensors of a source that
has both must be equal, to the bit, and only the first tensor (of the rule in ``tied_to``) is copied. With ``tied =
"both"``, the first tensor is also written in place of a second one that the source lacks. Its optimizer state is
written once, since a shared parameter has one state.

If a `config.json` next to the source says whether the two are one (``tie_word_embeddings``), and the caller does not,
the source must agree: with false, it has the second tensor; with true, a second tensor has the bits of the first.

A rule of only one convention gives second names, which only that convention knows:

    [[rule]]
    hf = "encoder.embed_tokens.weight : v m"
    tied_to = "shared.weight"

Such a tensor is always compared, and only the first one is copied. It is written in DCP, or with ``tied = "both"``. The
same holds for the tensor of a rule with ``tied_to`` if the convention on the other side has no name for it, such as
MaxText's Gemma, which has one weight for both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo, unreadable
from bridge.core.formats.tensors.boxes import split_box
from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.entries import Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.one_rule.apply import apply_rule
from bridge.core.mapping.one_rule.instance import Axes, View
from bridge.core.mapping.states.source_tree import SourceTree, Tensors

_BETWEEN = "other"


def one_of_two(
    reader: CheckpointReader, mapping: MappingTable, tree: SourceTree, target: Convention, axes: Axes
) -> list[str]:
    """Weights that the source has twice and the target gets once, after a comparison of all their bits.

    Raises MappingError if the two differ, or if the second one has its own optimizer state.
    """
    twice: list[str] = []
    source = tree.convention.name
    for rule, other in _pairs(mapping, source):
        if mapping.tied != "once" and not (rule.is_second_name or _has_one(target, rule)):
            continue
        own = _weights(rule, source, tree.weights)
        if not own or not _weights(other, source, tree.weights):
            continue
        joint = Rule({source: other.entries(source), _BETWEEN: rule.entries(source)})
        members = _weights(other, source, tree.weights)
        for weight, view in apply_rule(joint, source, _BETWEEN, members, axes):
            info = own.get(weight)
            if info is None:
                continue
            if not alike(reader, view, info):
                remedy = (
                    "leave out the one that this model does not use (--drop)"
                    if rule.is_second_name
                    else f"convention {target.name} has one tensor for both, and cannot hold such a model"
                    if _has_one(target, rule)
                    else "this model has two weights, so leave out the option that says they are tied"
                )
                raise MappingError(
                    f"{info.name} of {reader.path} differs from {view.blocks[0].source}, but tied weights must be "
                    f"equal: {remedy}"
                )
            twice.append(weight)
        with_state = [
            tensors[weight].name
            for state in tree.states
            for tensors in state.sections.values()
            for weight in twice
            if weight in tensors
        ]
        if with_state:
            raise MappingError(
                f"{with_state[0]} is optimizer state of a tied weight: expected no state of {', '.join(twice)}, whose "
                "values another weight "
                f"has{'; leave out the option that says they are tied' if mapping.tied == 'once' else ''}"
            )
    return twice


def require_ties(
    reader: CheckpointReader, mapping: MappingTable, tree: SourceTree, axes: Axes, parts: Collection[str]
) -> None:
    """Raise MappingError if the output layer contradicts the model's configuration.

    parts: the parts of the model that the source has.
    """
    source = tree.convention
    if mapping.ties is None or mapping.tied is not None or source.without:
        return
    for rule, other in _pairs(mapping, source.name):
        own, first = (_weights(r, source.name, tree.weights) for r in (rule, other))
        if rule.is_second_name or not first or (rule.part and rule.part not in parts):
            continue
        if not mapping.ties and not own:
            (name, *_) = (entry.path.text for entry in rule.entries(source.name))
            raise MappingError(
                f"the config.json of {reader.path} says that tie_word_embeddings is false: expected {name}, found "
                "none. If the model's output layer is its embedding, say so (--tied once, or --tied both to write it "
                "twice)"
            )
        if mapping.ties and own:
            joint = Rule({source.name: other.entries(source.name), _BETWEEN: rule.entries(source.name)})
            for weight, view in apply_rule(joint, source.name, _BETWEEN, first, axes):
                if weight in own and not alike(reader, view, own[weight]):
                    raise MappingError(
                        f"the config.json of {reader.path} says that tie_word_embeddings is true, but "
                        f"{own[weight].name} differs from {view.blocks[0].source}: expected equal bits. If the model "
                        f"uses the embedding, leave the other out (--drop '{own[weight].name}'); if it has two "
                        "weights, correct the file, or insist (--any-model)"
                    )


def second_of_two(
    mapping: MappingTable, tree: SourceTree, target: str, axes: Axes, parts: Collection[str], *, every: bool
) -> Iterator[tuple[str, View]]:
    """Target tensors, by weight, that the source lacks and that share another tensor. Raises as `apply_rule` does.

    parts: the parts of the model that the source has. every: whether second names are written by default.
    """
    source = tree.convention.name
    pairs = [*_pairs(mapping, source)] if mapping.tied == "both" else []
    if mapping.tied == "both" or (mapping.tied is None and every):
        pairs += [
            (rule, other)
            for rule, other in _pairs(mapping, target)
            if rule.is_second_name or _has_one(tree.convention, rule)
        ]
    for rule, other in pairs:
        missing = not _weights(rule, source, tree.weights) and (not rule.part or rule.part in parts)
        if rule.entries(target) and other.entries(source) and missing:
            joint = Rule({source: other.entries(source), target: rule.entries(target)})
            yield from apply_rule(joint, source, target, _weights(other, source, tree.weights), axes)


def under_first_names(mapping: MappingTable, tree: SourceTree) -> None:
    """Give the first name to tensors that the source has only under a second name, and to their optimizer state."""
    source = tree.convention.name
    for rule, other in _pairs(mapping, source):
        if not rule.is_second_name or not other.entries(source) or _weights(other, source, tree.weights):
            continue
        (second,), (first, *_) = rule.entries(source), other.entries(source)
        for tensors in (tree.weights, *(t for state in tree.states for t in state.sections.values())):
            for weight, values in [(weight, second.path.match(weight)) for weight in tensors]:
                if values is not None:
                    tensors[first.path.format(values)] = tensors.pop(weight)


def _pairs(mapping: MappingTable, source: str) -> Iterator[tuple[Rule, Rule]]:
    for rule in mapping.rules:
        if rule.tied_to and rule.entries(source):
            yield rule, mapping.rule_of(rule.tied_to)


def _has_one(convention: Convention, rule: Rule) -> bool:
    """Whether the convention has no name for this second tensor, even though the model has a head."""
    return not rule.entries(convention.name) and not convention.without


def _weights(rule: Rule, convention: str, weights: Tensors) -> Tensors:
    patterns = [entry.path for entry in rule.entries(convention)]
    return {w: info for w, info in weights.items() if any(path.match(w) is not None for path in patterns)}


def alike(reader: CheckpointReader, view: View, info: TensorInfo) -> bool:
    """Whether ``view`` has the shape, dtype and bits of a tensor of the checkpoint."""
    if (view.shape, view.dtype) != (info.shape, info.dtype):
        return False
    closed = unreadable(reader)
    if info.name in closed:
        # In a template without values, shapes are all that is known.
        return all(block.source in closed for block in view.blocks)
    for box in split_box(Box.whole(view.shape), view.dtype.itemsize):
        if not box.numel:
            continue
        left, right = (
            a.reshape(-1).view(np.uint8) for a in (view.read(reader, box), reader.read(info.name, box))
        )
        if not np.array_equal(left, right):
            return False
    return True
