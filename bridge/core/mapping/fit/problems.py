"""Collects everything that does not fit: each kind is one sentence, with a count and the first names."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.whole.adapters import adapter_tensor
from bridge.core.formats.whole.quantized import DECODE, DECODE_ELSEWHERE, quantized
from bridge.core.mapping.language.entries import Rule
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
