"""Collects everything that does not fit: each kind is one sentence, with a count and the first names.

Also which tensors a model must have: for required rules, for parts of the model, and for all numbers.

    [[rule]]                                   # a model has it

    [[rule]]
    optional = true                            # a model may have it

    [[rule]]
    optional = "decoder"                       # a part: a model has all of the part's tensors, or none

    [[rule]]
    optional = "experts of layer {i}"          # a part of each layer: layers may differ, such as dense ones and experts

A rule that has a tensor for one layer must have one for each layer, unless it is optional or belongs to a part of each
layer. Only this check notices that the tensors of the last layer are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.whole.adapters import adapter_tensor
from bridge.core.formats.whole.quantized import DECODE, DECODE_ELSEWHERE, quantized
from bridge.core.mapping.language.entries import PathPattern, Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.one_rule.open_axes import OpenAxes, together
from bridge.core.text import first_of

NAMES = "\0"
"""The place of the names in the sentence of `Problems.add`; not "{}", since rules are full of braces."""


class Problems:
    """Problems of a plan, in the order in which their kinds were found."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, None]] = {}
        self._open: list[OpenAxes] = []

    def __bool__(self) -> bool:
        return bool(self._kinds or self._open)

    def append(self, text: str) -> None:
        """Add a single problem."""
        self._kinds.setdefault(text, {})

    def add(self, text: str, name: str) -> None:
        """Add one of a kind: all problems with equal ``text`` become one sentence, with their names at `NAMES`."""
        self._kinds.setdefault(text, {})[name] = None

    def raised(self, error: MappingError) -> None:
        """Add a problem from an error."""
        if isinstance(error, OpenAxes):
            self._open.append(error)
        else:
            self.append(str(error))

    def texts(self, mapping: str) -> list[str]:
        """A text for each kind; ``mapping`` is the name of the mapping."""
        texts = [text.replace(NAMES, first_of(names)) for text, names in self._kinds.items()]
        return [*texts, *([together(mapping, self._open)] if self._open else [])]


def misfit(
    reader: CheckpointReader,
    count: int,
    mapping: MappingTable,
    side: str,
    unmatched: Sequence[str],
    unused: Sequence[Rule],
) -> str:
    """What does not fit: which of ``count`` tensors match no rule, and which rules of ``side`` have no tensor."""
    rules = [rule for rule in mapping.rules if rule.entries(side)]
    if (encoded := quantized(unmatched)) is not None:
        name, encoding, readable = encoded
        remedy = DECODE if readable else DECODE_ELSEWHERE
        return (
            f"{name} of {reader.path} belongs to quantized weights ({encoding}), and {len(unmatched)} of {count} "
            f"tensors match no rule of mapping {mapping.name}, whose rules are for plain weights: {remedy}, or leave "
            "the mapping out to keep names and bytes"
        )
    if (of_adapter := adapter_tensor(unmatched)) is not None:
        return (
            f"{of_adapter} of {reader.path} belongs to a LoRA adapter, and mapping {mapping.name} is for whole models: "
            "merge the adapter into its base model (convert BASE DST --merge-adapter ADAPTER), or leave the mapping "
            "out to keep the names"
        )
    paths = [entry.path.text for rule in rules for entry in rule.entries(side)]
    stacked = {path.replace(".{i}.", "."): path for path in paths if ".{i}." in path}
    if (layers := next((name for name in unmatched if name in stacked), None)) is not None:
        return (
            f"{layers} of {reader.path} stores all layers in one tensor, as in Megatron's torch_dist, but {side} of "
            f"mapping {mapping.name} has one tensor for each layer ({stacked[layers]}): convert the checkpoint first "
            f"(Megatron-LM: --ckpt-convert-format torch), or write rules with layers as an axis ({layers} : {{i}} m)"
        )
    lines = [f"mapping {mapping.name} does not fit {reader.path}; is this another model?"]
    if len(mapping.conventions) > 2:
        lines.append(f"The nearest of its conventions ({', '.join(mapping.conventions)}) is {side}.")
    if unmatched:
        lines.append(f"{len(unmatched)} of {count} tensors match no rule: {first_of(unmatched)}.")
    if unused:
        texts = [" & ".join(e.path.text for e in rule.entries(side)) for rule in unused]
        lines.append(f"{len(unused)} of {len(rules)} rules found no tensor: {first_of(texts)}.")
    else:
        lines.append(f"Mapping {mapping.name} knows {first_of(paths)}.")
    lines.append(
        "Add rules, list the tensors to leave out under drop, or leave the mapping out to keep the names."
    )
    return " ".join(lines)


def needed(rules: Sequence[Rule], convention: str) -> dict[str, set[int]]:
    """The required rules of a convention, by id, for each part of the model that needs them; "": any model."""
    by_part: dict[str, set[int]] = {"": set()}
    for rule in rules:
        if rule.entries(convention) and not rule.is_second_name and (rule.part or not rule.optional):
            by_part.setdefault(rule.part, set()).add(id(rule))
    return by_part


def complete(used: set[int], needs: Mapping[str, set[int]]) -> bool:
    """Whether all required rules have tensors, and for each part either all of its rules or none."""
    return all(used >= rules or (part and not used & rules) for part, rules in needs.items())


def idle(rules: Sequence[Rule], convention: str, owners: Mapping[str, Rule]) -> list[Rule]:
    """The required rules that have no tensor. owners: the rule of each weight."""
    used = {id(rule) for rule in owners.values()}
    parts = {rule.part for rule in owners.values()} | {""}
    due = set().union(*(ids for part, ids in needed(rules, convention).items() if part in parts))
    return [rule for rule in rules if id(rule) in due - used]


def num_layers(convention: str, owners: Mapping[str, Rule]) -> int:
    """The highest count of numbers in names with one number; 0 if no name counts, or if blocks count separately."""
    seen: dict[str, set[int]] = {}
    for weight, rule in owners.items():
        if convention in rule.cases:
            return 0
        for entry in rule.entries(convention):
            values = entry.path.match(weight) or {}
            if len(values) == 1:
                seen.setdefault(entry.path.text.partition("{")[0], set()).update(values.values())
    return max(map(len, seen.values()), default=0)


def uneven(rules: Sequence[Rule], convention: str, owners: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    """Find rules without a tensor for a number that other rules have. owners: the rule of each weight.

    A problem is a sentence with `NAMES` in it, and the rule to name there, see `Problems.add`.
    """
    by_id = {id(rule): rule for rule in rules}
    # Numbers are grouped by the name before them, so that blocks and the experts of each layer are counted separately.
    seen: dict[str, dict[int, set[int]]] = {}
    parts: dict[tuple[str, str], set[int]] = {}
    for weight, rule in owners.items():
        for entry in rule.entries(convention):
            values = entry.path.match(weight)
            if values is None or (rule.optional and not rule.part):
                continue
            if rule.of_each:
                parts.setdefault((rule.part, rule.part_at(values)), set()).add(id(rule))
            for index, value in values.items():
                if index not in rule.part:
                    before = entry.path.text.partition(index)[0]
                    layer_part = PathPattern(before).format(values) + index if before else index
                    seen.setdefault(layer_part, {}).setdefault(id(rule), set()).add(value)
    for layer_part, numbers in seen.items():
        everything = set().union(*numbers.values())
        for key, there in numbers.items():
            if missing := sorted(everything - there):
                yield (
                    f"rule {NAMES}: expected a tensor for each {layer_part} that other rules have, found none for "
                    f"{first_of(missing)}; if the model really lacks the tensor, mark the rule optional",
                    str(by_id[key]),
                )
    due = needed(rules, convention)
    lacking: dict[int, list[str]] = {}
    for (part, at), have in parts.items():
        for key in due[part] - have:
            lacking.setdefault(key, []).append(at)
    for key, places in lacking.items():
        yield (
            f"rule {NAMES}: expected a tensor wherever other rules of the same part match one, found none for "
            f"{first_of(places)}",
            str(by_id[key]),
        )
