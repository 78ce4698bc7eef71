"""Find the blocks that a model repeats; they become the units if the caller chooses none.

Candidates are numbered siblings. A series of siblings counts if two members have parameters with the same names, or if
the series is a list of one member, or has one of the usual names::

    layers/0, layers/1, ...            items of a list, layers of a stack
    Block_0, Block_1, ...              as linen numbers modules; also layers_0, block0
    block, block_1, ...                as haiku numbers modules

If members of a series have submodules with parameters, only such members are blocks, so an embedding and a norm in one
list with the blocks are not. Series inside blocks do not count (experts of a layer). If any blocks have submodules, a
series of modules without submodules (``Dense_0``, ``Dense_1`` next to ``Block_*``) does not count either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_USUAL = ("layers", "blocks", "h")
_NUMBERED = re.compile(r"(.*?)_?(\d+)")
Series = tuple[str, str]


@dataclass(frozen=True)
class _Module:
    """``names``: relative names of its parameters; ``composite``: whether it has submodules with parameters."""

    path: str
    names: frozenset[str]
    composite: bool


def repeated_blocks(paths: Mapping[str, str], parameters: Iterable[str]) -> list[str]:
    """Dotted paths of the blocks, in the order of ``paths``; empty if nothing is repeated.

    ``paths``: dotted path -> path in the model of every module that may be a unit. ``parameters``: paths in the model.
    """
    below: dict[str, set[str]] = {}
    for parameter in parameters:
        parts = parameter.split("/")
        for length in range(1, len(parts)):
            below.setdefault("/".join(parts[:length]), set()).add("/".join(parts[length:]))
    modules = {
        dotted: _Module(dotted, frozenset(below[path]), any("/" in name for name in below[path]))
        for dotted, path in paths.items()
        if path in below
    }
    series = _series(modules)
    chosen: list[_Module] = []
    # Outermost first, so that series inside blocks are recognized.
    for members in sorted(series, key=lambda members: members[0].path.count(".")):
        inside = any(members[0].path.startswith(f"{block.path}.") for block in chosen)
        if not inside:
            chosen.extend(_blocks(members))
    if any(block.composite for block in chosen):
        chosen = [block for block in chosen if block.composite]
    block_paths = {block.path for block in chosen}
    return [path for path in paths if path in block_paths]


def _series(modules: Mapping[str, _Module]) -> list[list[_Module]]:
    numbered_series: dict[Series, list[_Module]] = {}
    unnumbered: dict[Series, _Module] = {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            unnumbered[parent, name] = module
        else:
            numbered_series.setdefault((parent, numbered[1]), []).append(module)
    for key, members in numbered_series.items():
        if key in unnumbered:
            members.insert(0, unnumbered[key])
    return [members for key, members in numbered_series.items() if _counts(key, members)]


def _counts(key: Series, members: Sequence[_Module]) -> bool:
    parent, stem = key
    usual = (stem or parent.rpartition(".")[2]).lower() in _USUAL
    alone = len(members) == 1 and not stem
    return usual or alone or len({member.names for member in members}) < len(members)


def _blocks(members: Sequence[_Module]) -> Sequence[_Module]:
    return [member for member in members if member.composite] or members
