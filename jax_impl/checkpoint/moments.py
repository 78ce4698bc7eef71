"""Match the parts of a saved optimizer state, perhaps of another optimizer, to the parts of this optimizer's state.

A part is the state of one transformation: its arrays by parameter, and the numbers that belong to them::

    chain(clip, adamw)         1/0  count mu nu    ->    ""  count mu nu     main_weight_adamw
    adamw with a schedule      0    count mu nu    ->    ""
                               2    count

Either all numbers of a part are taken, or nothing of that part. Either all moments of a parameter are taken, or none:
new second moments with old first moments would make the first steps far too large. Moments with scales (``mu_scale``
for ``mu``) fit only moments with scales. Two parts fit better if they share more kinds of arrays, and a longer end of
their paths; positions in a chain may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from jax_impl.checkpoint.names import ShapeDtype

# An entry of a part: the last word of its name, and whether there is one for each parameter.
_Key = tuple[str, bool]
_Node = tuple[str, ...]
_Part = dict[_Key, dict[str, tuple[str, ShapeDtype]]]
_NUMBERS = ""
SCALE = "_scale"
"""The suffix that turns a moment's name into the name of its scales."""
Tensors = Mapping[str, tuple[str, ShapeDtype]]


def match_moments(expected: Tensors, stored: Tensors, parameters: Collection[str]) -> dict[str, str]:
    """The name of the saved tensor for each expected tensor that has a match of the same shape and dtype.

    ``expected``, ``stored``: full name, shape and dtype, by the name inside the optimizer state.
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
    """The path of the parameter to which a tensor of an optimizer's state belongs, "" for a number."""
    words = name.split("/")
    return next((path for i in range(len(words)) if (path := "/".join(words[i:])) in parameters), "")


def _shared(part: _Part, stored: _Part) -> dict[str, str]:
    """Sources of all numbers of a part, and of the moments of each parameter whose moments are complete."""
    by_path: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
    for key, tensors in part.items():
        for path, (name, tensor) in tensors.items():
            source, other = stored.get(key, {}).get(path, (None, None))
            fits = other == tensor and _has_scales(part, key, path) == _has_scales(stored, key, path)
            by_path[path][name] = source if fits else None
    complete = {
        path: own_sources for path, own_sources in by_path.items() if None not in own_sources.values()
    }
    # Numbers have no path. Bias correction needs the step count of exactly these moments.
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
    """Each part with its best match, if that match is unique; best pairs first."""
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
        # Tied parts have no better partner left, so they are left out together with all their candidates.
        gone, taken = {node for node, _ in tied}, {other for _, other in tied}
        scores = {p: score for p, score in scores.items() if p[0] not in gone and p[1] not in taken}
    return pairs


def _common_end(a: _Node, b: _Node) -> int:
    return next((i for i in range(min(len(a), len(b))) if a[-1 - i] != b[-1 - i]), min(len(a), len(b)))


def _alike(a: _Node, b: _Node) -> bool:
    """Whether one path's words are the end of the other's; positions in chains do not count as words."""
    first, second = ([word for word in words if not word.isdigit()] for words in (a, b))
    shorter = min(len(first), len(second))
    return first[len(first) - shorter :] == second[len(second) - shorter :]
