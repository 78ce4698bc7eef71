"""The moments of another optimizer that fit: which part of a saved optimizer state is which part of this one's.

A part is what one transformation keeps: its arrays by parameter, and numbers that belong to them::

    chain(clip, adamw)         1/0  count mu nu    ->    ""  count mu nu     main_weight_adamw
    adamw with a schedule      0    count mu nu    ->    ""
                               2    count

All numbers of a part are taken, or nothing of it. All moments of a parameter are taken, or none: new second moments
with old first ones would make its first steps far too large. Moments with scales (``mu_scale`` for ``mu``) fit
others with scales only. The more kinds of arrays two parts share, and the more of their places' ends, the better they
fit; positions in a chain may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from jax_impl.checkpoint.names import ShapeDtype

# What is kept under a part: the last word of its name, and whether it is kept for each parameter.
_Key = tuple[str, bool]
_Node = tuple[str, ...]
_Part = dict[_Key, dict[str, tuple[str, ShapeDtype]]]
_NUMBERS = ""
SCALE = "_scale"
"""What the name of the scales of a moment has behind that of the moment."""
Tensors = Mapping[str, tuple[str, ShapeDtype]]


def match_moments(expected: Tensors, stored: Tensors, parameters: Collection[str]) -> dict[str, str]:
    """The name of the saved tensor for each expected one that has one of its shape and dtype.

    ``expected``, ``stored``: full name and kind, by the name inside of the optimizer state.
    """
    own, saved = _parts(expected, parameters), _parts(stored, parameters)
    sources: dict[str, str] = {}
    for node, other in _pairs(own, saved):
        sources |= _shared(own[node], saved[other])
    return sources


def _parts(tensors: Tensors, parameters: Collection[str]) -> dict[_Node, _Part]:
    parts: defaultdict[_Node, _Part] = defaultdict(dict)
    for name, tensor in tensors.items():
        words = name.split("/")
        path = parameter_of(name, parameters)
        entry = words[: len(words) - len(path.split("/"))] if path else words
        key = (entry[-1] if entry else "", bool(path))
        parts[tuple(entry[:-1])].setdefault(key, {})[path] = tensor
    return dict(parts)


def parameter_of(name: str, parameters: Collection[str]) -> str:
    """The path of the parameter that a tensor of an optimizer's state belongs to, "" for a number."""
    words = name.split("/")
    return next((path for i in range(len(words)) if (path := "/".join(words[i:])) in parameters), "")


def _shared(part: _Part, stored: _Part) -> dict[str, str]:
    """Sources of all numbers of a part, and of all moments of those parameters that have all of them."""
    by_path: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
    for key, tensors in part.items():
        for path, (name, tensor) in tensors.items():
            source, other = stored.get(key, {}).get(path, (None, None))
            fits = other == tensor and _has_scales(part, key, path) == _has_scales(stored, key, path)
            by_path[path][name] = source if fits else None
    complete = {
        path: own_sources for path, own_sources in by_path.items() if None not in own_sources.values()
    }
    # Numbers have no path. Bias is corrected for the steps that a count says: it must be the one of just these moments.
    if (_NUMBERS in by_path and _NUMBERS not in complete) or (
        len(by_path) > 1 and complete.keys() == {_NUMBERS}
    ):
        return {}
    return {
        name: source
        for own_sources in complete.values()
        for name, source in own_sources.items()
        if source is not None
    }


def _has_scales(part: _Part, key: _Key, path: str) -> bool:
    return path in part.get((key[0] + SCALE, key[1]), {})


def _pairs(own: dict[_Node, _Part], saved: dict[_Node, _Part]) -> list[tuple[_Node, _Node]]:
    """Each part with the one that fits it best, of which no other part is as good; best pairs first."""
    scores = {
        (node, other): (
            len(part.keys() & stored.keys()),
            _common_end(node, other),
            node == other,
            -len(part.keys() ^ stored.keys()),
        )
        for node, part in own.items()
        for other, stored in saved.items()
        if part.keys() & stored.keys() and _alike(node, other)
    }
    pairs: list[tuple[_Node, _Node]] = []
    while scores:
        best = max(scores.values())
        tied = [pair for pair, score in scores.items() if score == best]
        for node, other in tied:
            if sum(node == pair[0] or other == pair[1] for pair in tied) == 1:
                pairs.append((node, other))
        # Those that are tied have no better partner left, so they are left out with all that they could be.
        gone, taken = {node for node, _ in tied}, {other for _, other in tied}
        scores = {p: score for p, score in scores.items() if p[0] not in gone and p[1] not in taken}
    return pairs


def _common_end(a: _Node, b: _Node) -> int:
    return next((i for i in range(min(len(a), len(b))) if a[-1 - i] != b[-1 - i]), min(len(a), len(b)))


def _alike(a: _Node, b: _Node) -> bool:
    """Whether two places have the same words, as far as both have any; positions in chains are none."""
    first, second = ([word for word in words if not word.isdigit()] for words in (a, b))
    shorter = min(len(first), len(second))
    return first[len(first) - shorter :] == second[len(second) - shorter :]
