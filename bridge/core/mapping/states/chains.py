"""The optax chain around a state from torch, whose checkpoints contain no chains.

Parts of a chain without state are empty, but stock Orbax restores only trees of equal length:

    place of the moments      optimizer written                               parts
    opt_state/0/mu            optax.adamw with a constant rate                0: state, 1 and 2: nothing
    opt_state/0/trace         optax.sgd with a constant rate                  0: state, 1: nothing
    opt_state/1/0/mu          the same after a part without state          0: nothing, 1: adamw
    opt_state/mu              only the state, as of optax.scale_by_adam      none
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge.core.formats.tensors.base import TreePath
from bridge.core.mapping.language.conventions import Convention, Section

_BEHIND: tuple[tuple[Section, str, int], ...] = (
    ("exp_avg", "optax.adamw", 2),
    ("momentum_buffer", "optax.sgd with momentum", 1),
)
"""Moment, optimizer, and the number of parts after its state: weight decay and the learning rate."""

_TEMPLATE = "convert with a checkpoint that your program saved as the template (--like)"


def completed(
    target: Convention, sections: Collection[Section], taken: Sequence[TreePath]
) -> tuple[dict[TreePath, object], str]:
    """The empty parts of the chain, and a sentence that says which optimizer can restore the tree.

    sections: the written parts of an optimizer's state. taken: the paths that are in use.
    """
    written = [entry for entry in _BEHIND if entry[0] in sections]
    if not written:
        return {}, ""
    section, _, behind = written[0]
    path = target.path_of(section)
    node = path[: max(k for k, key in enumerate(path) if key in ("mu", "trace"))]
    shown = "/".join(map(str, node))
    optimizers = " and ".join(name for _, name, _ in written)
    if len(written) > 1:
        return {}, (
            f"{shown} contains the states of {optimizers}, which no optax chain has together, so stock Orbax can "
            f"restore it for no optimizer: {_TEMPLATE}"
        )
    wrapper = next((key for key in node[1:] if isinstance(key, str)), None)
    if wrapper is not None:
        return {}, (
            f"{shown} contains the state of {optimizers} inside {wrapper}, whose other values torch does not have, so "
            f"stock Orbax can restore it for no optimizer: {_TEMPLATE}"
        )
    if len(node) == 1:
        return {}, f"{shown} contains only the state of {optimizers}, without a chain"
    empty = [(*node[:k], part) for k in range(1, len(node)) for part in range(int(node[k]))]
    empty += [(*node[:-1], int(node[-1]) + part) for part in range(1, behind + 1)]
    free = [part for part in empty if not any(path[: len(part)] == part for path in taken)]
    if len(free) < len(empty):
        # The source has further parts, as from an optax chain.
        return dict.fromkeys(free), ""
    front = ", after parts without state" if any(node[1:-1]) else ""
    count = "/".join(map(str, (*empty[-1], "count")))
    return dict.fromkeys(free), (
        f"{node[0]} is the state of {optimizers} with a constant learning rate{front}, and stock Orbax restores it "
        f"only for that chain. For another chain, such as one with a schedule, which also has {count}: {_TEMPLATE}"
    )
