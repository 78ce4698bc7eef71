"""Which torch modules correspond to which JAX modules: modules that own the same parameters.

The relation of parameters (``WeightMap``) decides it, without names of modules::

    torch                                        JAX
    model.layers.1.mlp       owns                layers/1/mlp          owns
      gate_proj.weight  <------------------------>  gate/kernel
      up_proj.weight    <------------------------>  up/kernel
      down_proj.weight  <------------------------>  down/kernel

If several nested modules own the same parameters (a wrapper and the module in it), the innermost ones are partners,
then the next ones outward. The roots are always partners. A ``[[pair]]`` of the caller takes precedence over all this.
Modules without parameters (activations, rotary tables, dropout) have no partner unless the caller names one: their
effect shows in the module around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.parity.partners.weight_map import Key, WeightMap
from bridge.parity.recorded.recording import Recording


@dataclass(frozen=True)
class ModulePair:
    """Two modules that should compute the same. ``order``: of the torch module's first call, counted from 0."""

    torch: str
    jax: str
    order: int

    @property
    def name(self) -> str:
        """For a person: the torch path, "(model)" for the root."""
        return self.torch or "(model)"


@dataclass(frozen=True)
class Modules:
    """The pairs, in the order of the torch model's calls, and called modules without a partner."""

    pairs: tuple[ModulePair, ...]
    torch_only: tuple[str, ...]
    jax_only: tuple[str, ...]


def pair_modules(
    weights: WeightMap, torch: Recording, jax: Recording, named_pairs: Mapping[str, str] | None = None
) -> Modules:
    """Partners among the modules that were called. ``given``: JAX paths by torch path, from the caller.

    Raises ``ValueError`` for a given path without a call.
    """
    torch_paths = list(dict.fromkeys(call.path for call in torch.calls))
    jax_paths = list(dict.fromkeys(call.path for call in jax.calls))
    chosen = dict(named_pairs or {})
    for path, known, side in (
        *((path, torch_paths, "torch") for path in chosen),
        *((path, jax_paths, "jax") for path in chosen.values()),
    ):
        if path not in known:
            raise ValueError(
                f"[[pair]]: expected a {side} module that was called, got {path!r}; called were "
                f"{', '.join(repr(path) for path in known[:12])}{' and more' if len(known) > 12 else ''}"
            )
    chosen.setdefault("", "")
    edges = weights.edges
    left = _owned(torch_paths, {key for key, _ in edges}, ".")
    right = _owned(jax_paths, {key for _, key in edges}, "/")
    image: defaultdict[Key, set[Key]] = defaultdict(set)
    back: defaultdict[Key, set[Key]] = defaultdict(set)
    for key, other in edges:
        image[key].add(other)
        back[other].add(key)
    by_keys = _grouped(right, set(chosen.values()))
    for keys, paths in _grouped(left, chosen).items():
        partners = frozenset(twin for key in keys for twin in image[key])
        if frozenset(key for twin in partners for key in back[twin]) != keys:
            continue
        # Innermost first: their paths are the longest.
        twins = sorted(by_keys.get(partners, []), key=len, reverse=True)
        for path, partner in zip(sorted(paths, key=len, reverse=True), twins, strict=False):
            chosen[path] = partner
    pairs = [ModulePair(path, other, torch_paths.index(path)) for path, other in chosen.items()]
    return Modules(
        tuple(sorted(pairs, key=lambda pair: pair.order)),
        tuple(path for path in torch_paths if path not in chosen),
        tuple(path for path in jax_paths if path not in chosen.values()),
    )


def _grouped(owned: Mapping[str, frozenset[Key]], chosen: Container[str]) -> dict[frozenset[Key], list[str]]:
    """The paths that own something and have no partner yet, by the keys that they own."""
    groups: dict[frozenset[Key], list[str]] = {}
    for path, keys in owned.items():
        if keys and path not in chosen:
            groups.setdefault(keys, []).append(path)
    return groups


def _owned(paths: Sequence[str], keys: Iterable[Key], separator: str) -> dict[str, frozenset[Key]]:
    """The keys below each path. A number in a path that is in no parameter's name is a layer of a stack."""
    tree = _Node()
    for key in keys:
        node = tree
        node.keys.add(key)
        for part in key[0].split(separator):
            node = node.children.setdefault(part, _Node())
            node.keys.add(key)
    owned = {}
    for path in paths:
        node, numbers = tree, []
        for part in path.split(separator) if path else ():
            if part in node.children:
                node = node.children[part]
            elif part.isdecimal():
                numbers.append(int(part))
            else:
                node = _Node()
                break
        layer = tuple(numbers)
        owned[path] = frozenset(key for key in node.keys if key[1][: len(layer)] == layer)
    return owned


class _Node:
    """A part of the tree of parameter names, with all keys below."""

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.keys: set[Key] = set()
