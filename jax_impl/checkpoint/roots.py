"""Find the weights, the optimizer state and the step in a checkpoint by the names of its trees.

::

    known words    params/<path>   model/params/<path>   opt_state/mu/<path>   step      found automatically
    other words    student/<path>   teacher/params/<path>                                ``tree="student"`` chooses

A chosen tree is searched like a whole checkpoint; missing parts of the optimizer state may be next to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from jax_impl.checkpoint.names import ShapeDtype

# Usual names of trees that hold a model's parameters, and of the trees around them; the likeliest name comes first.
_WEIGHTS = ("params", "model", "weights", "state", "train_state")
_OPTIMIZER = ("opt_state", "optimizer")
_VALUE = "value"


def root_of_weights(names: Collection[str], parameters: Collection[str], tree: str) -> str:
    """The tree that contains the most parameters; among equals, the outermost tree or the likeliest name.

    ``tree``: the tree to search, "" for the whole checkpoint.
    """

    def rank(root: str) -> tuple[int, int, list[int]]:
        have = sum(any(n in names for n in spellings(root, path)) for path in parameters)
        inner = root.removeprefix(tree).strip("/")
        words = inner.split("/") if inner else []
        return -have, len(words), [_WEIGHTS.index(word) for word in words]

    default = tree or "params"
    roots = {default, tree, *(root for name in names for root in _prefixes(name, _WEIGHTS, tree))}
    best = min(roots, key=rank)
    return best if rank(best)[0] else default


def root_of_optimizer(names: Collection[str], tree: str) -> str:
    """The innermost tree that is named like an optimizer, preferably in ``tree``; ``opt_state`` if there is none."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    for base in (tree, ""):
        roots = [
            root
            for name in names
            for root in _prefixes(name, words, base)
            if root.rpartition("/")[2] in _OPTIMIZER
        ]
        if roots:
            return max(roots, key=lambda root: root.count("/"))
    return "opt_state"


def is_of_optimizer(name: str, tree: str) -> bool:
    words = (*_OPTIMIZER, *_WEIGHTS)
    return any(root.rpartition("/")[2] in _OPTIMIZER for root in _prefixes(name, words, tree))


def step_beside(tensors: Mapping[str, ShapeDtype], used: Collection[str], tree: str) -> str | None:
    """The outermost integer that is called step and is only inside known trees or ``tree``."""
    words = (*_OPTIMIZER, *_WEIGHTS)
    numbers = [n for n, k in tensors.items() if n not in used and k.shape == () and k.dtype.kind in "iu"]
    for base in (tree, ""):
        steps = [
            name
            for name in numbers
            for root in (base, *_prefixes(name, words, base))
            if name in spellings(root, "step")
        ]
        if steps:
            return min(steps, key=lambda name: name.count("/"))
    return None


def trees_of_weights(names: Collection[str], parameters: Collection[str]) -> list[str]:
    """Every tree, with any name, that has all or most parameters; "" is the top. Optimizer states do not count."""
    counts: Counter[str] = Counter()
    for name in names:
        for spelling in {name, name.removesuffix(f"/{_VALUE}")}:
            words = spelling.split("/")
            for start in range(len(words)):
                if "/".join(words[start:]) in parameters and not {*words[:start]} & {*_OPTIMIZER}:
                    counts["/".join(words[:start])] += 1
    most = max(counts.values(), default=0)
    return sorted(root for root, count in counts.items() if 2 * count > most)


def is_below(name: str, tree: str) -> bool:
    return not tree or name.startswith(f"{tree}/")


def _prefixes(name: str, words: Collection[str], tree: str) -> Iterator[str]:
    """The roots of ``name`` in ``tree`` that consist of known words only."""
    if not is_below(name, tree):
        return
    start = f"{tree}/" if tree else ""
    parts = name.removeprefix(start).split("/")
    for end in range(1, len(parts)):
        if parts[end - 1] not in words:
            return
        yield start + "/".join(parts[:end])


def spellings(root: str, rest: str) -> tuple[str, str]:
    name = f"{root}/{rest}" if root else rest
    return name, f"{name}/{_VALUE}"


def bare(name: str, root: str) -> str:
    """The inverse of ``spellings``."""
    return name.removeprefix(f"{root}/").removesuffix(f"/{_VALUE}")
