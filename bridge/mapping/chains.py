"""The optax chain around a state that comes from torch, whose checkpoints say nothing about chains.

Parts of a chain without a state hold nothing, but stock Orbax restores only trees of equal length:

    place of the moments      optimizer written                               parts
    opt_state/0/mu            optax.adamw with a constant rate                0: state, 1 and 2: nothing
    opt_state/0/trace         optax.sgd with a constant rate                  0: state, 1: nothing
    opt_state/1/0/mu          the same behind a part without a state          0: nothing, 1: adamw
    opt_state/mu              the state alone, as of optax.scale_by_adam      none
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge.formats.base import TreePath
from bridge.mapping.conventions import Convention, Section

_BEHIND: tuple[tuple[Section, str, int], ...] = (
    ("exp_avg", "optax.adamw", 2),
    ("momentum_buffer", "optax.sgd with momentum", 1),
)
"""Moment, optimizer, and how many parts stand behind its state: weight decay, and the learning rate."""


def completed(
    target: Convention, sections: Collection[Section], taken: Sequence[TreePath]
) -> tuple[dict[TreePath, object], str]:
    """The empty parts of the chain, and a sentence that says which optimizer restores the tree.

    sections: what of an optimizer is written. taken: the paths that have something.
    """
    written = [(section, name, behind) for section, name, behind in _BEHIND if section in sections]
    if not written:
        return {}, ""
    section, name, behind = written[0]
    path = target.path_of(section)
    node = path[: max(k for k, key in enumerate(path) if key in ("mu", "trace"))]
    shown = "/".join(map(str, node))
    if len(written) > 1:
        return (
            {},
            f"{shown} has the states of {' and '.join(name for _, name, _ in written)}, as no chain of optax has",
        )
    wrapper = next((key for key in node[1:] if isinstance(key, str)), None)
    if wrapper is not None:
        return {}, (
            f"{shown} is inside of {wrapper}, whose other values torch does not have: stock Orbax restores this "
            "opt_state only with partial_restore=True"
        )
    if len(node) == 1:
        return {}, f"{shown} has the state of {name} alone, and nothing of a chain"
    empty = [(*node[:k], part) for k in range(1, len(node)) for part in range(int(node[k]))]
    empty += [(*node[:-1], int(node[-1]) + part) for part in range(1, behind + 1)]
    free = [part for part in empty if not any(path[: len(part)] == part for path in taken)]
    if len(free) < len(empty):
        # The source brought further parts, as from a chain of optax.
        return dict.fromkeys(free), ""
    front = ", behind parts without a state" if any(node[1:-1]) else ""
    count = "/".join(map(str, (*empty[-1], "count")))
    return dict.fromkeys(free), (
        f"opt_state is that of {name} with a constant rate{front}: stock Orbax restores it for no other chain, such as "
        f"one with a schedule, which has {count}, too"
    )
