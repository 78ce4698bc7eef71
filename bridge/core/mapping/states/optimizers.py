"""Which optimizer a state belongs to, and whether its numbers mean the same in torch and in optax.

The names of a weight's state identify the optimizer, as far as names can:

    torch    exp_avg, exp_avg_sq, step              Adam, AdamW, RAdam      optax    mu, nu, count
             momentum_buffer                        SGD                              trace

These pairs have equal numbers, so bits are copied. Every other state is refused, with the optimizer's name and the
reason. The formulas are from torch 2.13 and optax 0.2.8. The whole table is in `docs/reference/families.md`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from bridge.core.formats.tensors.base import CheckpointReader, TreePath
from bridge.core.formats.tensors.wrapping import value_of
from bridge.core.mapping.language.conventions import SECTIONS, Convention, Section
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS, WORDS_OF_MOMENTS
from bridge.core.mapping.states.source_tree import NameIndex, SourceTree
from bridge.core.text import first_of


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose state is not translated. words: distinctive names in its state. reason: why not."""

    name: str
    words: frozenset[str]
    reason: str


_TABLE = tomllib.loads((files(__package__) / "optimizers.toml").read_text(encoding="utf-8"))
TORCH, OPTAX, _PARTS_OF_ADAM = (
    tuple(Optimizer(row["name"], frozenset(row["words"]), row["reason"]) for row in _TABLE[key])
    for key in ("torch", "optax", "alone")
)
_AMSGRAD = TORCH[0], OPTAX[0]
_OPTAX_WORDS = frozenset(word for optimizer in OPTAX for word in optimizer.words)
_ALONE = {word: optimizer for optimizer in _PARTS_OF_ADAM for word in optimizer.words}

_GROUPS = "param_groups"
_OF_MUON = ("ns_steps", "backend_steps", "use_muon")
_OWN_DEPTH = 2
"""Keys before a weight in our own optimizers' state: ``opt_state/trace/<weight>``."""

_OF_MEGATRON = re.compile(
    r"optimizer\.distributed\.|optimizer\.state\.(?:exp_avg|exp_avg_sq|fp32_param|param)\."
)
"""Names in Megatron's torch_dist: of buckets, or the key before the weight."""

CARRIED = frozenset({"acc_grads", "grad_acc", "ema", "found_nan"})
"""optax's values other than an optimizer's state: sums of gradients, averages. They are copied unchanged."""


@dataclass(frozen=True)
class Refused:
    """Optimizers whose states are not translated. problems: a sentence for each. names: of their tensors."""

    problems: tuple[str, ...]
    names: frozenset[str]


def refused(
    reader: CheckpointReader,
    paths: Mapping[str, TreePath],
    source: SourceTree,
    target: Convention,
    index: NameIndex,
    *,
    is_template: bool = False,
) -> Refused:
    """The states in ``source`` that mean something else, or nothing, in ``target``.

    paths: of the source's objects. index: knows the weights' names. is_template: nothing can be dropped from it.
    """
    tree = source.convention.is_tree
    crossing = tree != target.is_tree
    if megatron := [info.name for info in source.others.values() if _OF_MEGATRON.search(info.name)]:
        text = (
            f"{reader.path} has the state of Megatron's distributed optimizer ({first_of(megatron)}), which is in "
            "buckets, or has all layers in one tensor, and is not translated. Leave it out (--drop '*optimizer.*')"
        )
        return Refused((text,), frozenset(megatron))
    kept = [*_from_sections(source, crossing)]
    if tree and crossing:
        every = [*(info.path for info in source.others.values()), *paths.values()]
        kept += _from_ends_of_chains(source, every)
    others = ((info.name, info.path) for info in source.others.values())
    if tree:
        kept += _from_tree(others, index)
    else:
        kept += _from_state_dict((*others, *paths.items()), index, paths.values())
        if crossing and not kept:
            alone = (s.sections.get("exp_avg", ()) for s in source.states if not s.sections.get("exp_avg_sq"))
            kept = [(_ALONE["exp_avg"], "exp_avg", weight, "") for weights in alone for weight in weights]
    # In optax, a name of an unknown optimizer, such as v, may be that of a known one.
    unknown = {weight: optimizer for optimizer, _, weight, _ in kept if tree and not optimizer.words}
    kept = [(unknown.get(weight, optimizer), word, weight, name) for optimizer, word, weight, name in kept]
    weights: dict[Optimizer, dict[str, None]] = {}
    words: dict[Optimizer, dict[str, None]] = {}
    for optimizer, word, weight, _ in kept:
        weights.setdefault(optimizer, {})[weight] = None
        words.setdefault(optimizer, {})[word] = None
    problems = [
        f"{reader.path} has the state of {optimizer.name} ({', '.join(sorted(words[optimizer]))} of "
        f"{first_of(names)}), which has no equivalent in {target.name}{f': {optimizer.reason}' if crossing else ''}. "
        f"Leave the optimizer's state out (--weights-only){'' if is_template else _without(optimizer, tree)}"
        for optimizer, names in weights.items()
    ]
    if crossing and not tree:
        problems += _of_groups(
            reader, paths, source, own=len(target.path_of("momentum_buffer")) == _OWN_DEPTH
        )
    return Refused(tuple(problems), frozenset(name for *_, name in kept if name))


def remarks(
    reader: CheckpointReader,
    paths: Mapping[str, TreePath],
    tree: SourceTree,
    target: Convention,
    kept: Iterable[str],
) -> Iterator[str]:
    """The assumptions of a translation between torch and optax.

    paths: of the source's objects. kept: names of tensors that are copied under their own names.
    """
    source = tree.convention
    if source.is_tree == target.is_tree:
        return
    if not source.is_tree:
        if tree.states and (shown := [f"{name} = {value!r:.20}" for name, value in _unusual(reader, paths)]):
            yield (
                "the optimizer has options that torch's Adam, AdamW, RAdam and SGD do not have by default "
                f"({first_of(shown)}): its state is read as if it belonged to one of these"
            )
        return
    for row in _TABLE["read_as"]:
        section: Section = row["section"]
        nodes = [n for n, state in enumerate(tree.states) if section in state.sections]
        if nodes:
            named = first_of([source.name_of(section, "*", node) for node in nodes], 1)
            yield f"{row['words']} ({named}) read as {row['meaning']}"
    sums = [name for name in kept if not CARRIED.isdisjoint(name.split("/"))]
    if sums:
        yield f"kept as they are, in the layout of {source.name}, which {target.name} does not read: {first_of(sums)}"


def _without(optimizer: Optimizer, tree: bool) -> str:
    if optimizer not in _AMSGRAD:
        return ""
    (word,) = optimizer.words
    return f", or leave out only the maximum, to continue as Adam (--drop '{f'*/{word}/*' if tree else f'*.{word}'}')"


_Kept = tuple[Optimizer, str, str, str]
"""An optimizer, a word of its state, the weight, and the tensor's or object's name; "" if it is translated."""


def _from_sections(source: SourceTree, crossing: bool) -> Iterator[_Kept]:
    """The optimizers of states with the same names as translated states."""
    tree = source.convention.is_tree
    for state in source.states:
        if crossing:
            optimizer, word = (_AMSGRAD[tree], "nu_max" if tree else "max_exp_avg_sq")
            yield from ((optimizer, word, weight, "") for weight in state.sections.get("max_exp_avg_sq", ()))
        first, second = (state.sections.get(section, {}) for section in ("exp_avg", "exp_avg_sq"))
        if tree and not (first and second):
            word = "mu" if first else "nu"
            yield from ((_ALONE[word], word, weight, "") for weight in (*first, *second))


def _from_ends_of_chains(source: SourceTree, others: Iterable[TreePath]) -> Iterator[_Kept]:
    """Traces in the last part of a chain: of optax.sgd, the learning rate follows, of optax.lars, it came before."""
    parts = {tuple(map(str, path[:k])) for path in others for k in range(2, len(path) + 1)}
    for state in source.states:
        for weight, info in state.sections.get("momentum_buffer", {}).items():
            keys = tuple(map(str, info.path))
            *chain, part = keys[: keys.index("trace")] if "trace" in keys else (*keys, "")
            # A checkpoint without the parts before does not show empty parts.
            shown = part.isdecimal() and (*chain, "0") in parts
            if shown and (*chain, str(int(part) + 1)) not in parts:
                yield _ALONE["trace"], "trace", weight, ""


def _from_tree(others: Iterable[tuple[str, TreePath]], index: NameIndex) -> Iterator[_Kept]:
    for name, path in others:
        if path[0] not in OPTIMIZER_KEYS:
            continue
        keys = [str(key) for key in path]
        start = next((k for k in range(2, len(keys)) if _knows(index, keys[k:])), None)
        if start is None or not (CARRIED | WORDS_OF_MOMENTS).isdisjoint(keys[:start]):
            continue
        # A tree of weights may have its own root below the word: v_row/params/...
        word = next((key for key in keys[1:start] if key in _OPTAX_WORDS), keys[start - 1])
        yield _named(OPTAX, word, "optax"), word, "/".join(keys[start:]), name


def _knows(index: NameIndex, keys: list[str]) -> bool:
    return index.knows("/".join(keys)) or (keys[-1] == "value" and index.knows("/".join(keys[:-1])))


def _from_state_dict(
    others: Iterable[tuple[str, TreePath]], index: NameIndex, objects: Iterable[TreePath]
) -> Iterator[_Kept]:
    """objects: the paths of all objects, which include the groups of an optimizer that numbers its weights."""
    with_groups = {path[:-3] for path in objects if path[-3:-2] == (_GROUPS,)}
    for name, path in others:
        keys = [str(key) for key in path]
        numbered = False
        if "state" in keys[1:-2]:
            start = keys.index("state", 1)
            weight, word = keys[start + 1], keys[start + 2]
            numbered = weight.isdecimal() and path[:start] in with_groups
        else:
            before, _, word = ".".join(keys).rpartition(".")
            _, _, weight = f".{before}".rpartition(".state.")
        # Data loaders and schedulers have state, too.
        parts = weight.split(".")
        known = numbered or any(index.knows(".".join(parts[k:])) for k in range(len(parts)))
        if known and f".state.{weight}.{word}" in f".{'.'.join(keys)}" and word not in SECTIONS:
            yield _named(TORCH, word, "torch"), word, weight, name


def _named(known: tuple[Optimizer, ...], word: str, library: str) -> Optimizer:
    names = "Adam, AdamW, RAdam or SGD" if library == "torch" else "adam, adamw, radam or sgd"
    unknown = Optimizer("another optimizer", frozenset(), f"{names} of {library} do not keep such values")
    return next((optimizer for optimizer in known if word in optimizer.words), unknown)


def _in_groups(paths: Mapping[str, TreePath]) -> Iterator[tuple[str, str]]:
    """Names of the values in groups of weights, and their keys."""
    for name, path in paths.items():
        if any(_GROUPS in str(part) for part in path):
            yield name, str(path[-1]).rpartition(".")[2]


def _of_groups(
    reader: CheckpointReader, paths: Mapping[str, TreePath], tree: SourceTree, own: bool
) -> Iterator[str]:
    """Problems of parameter groups whose moments differ from optax's moments with the same names.

    own: the target's state belongs to our own optimizers, which have no chain, and keep Muon's state as torch does.
    """
    reasons = {
        key: reason
        for section, reasons in _TABLE["otherwise"].items()
        if any(section in state.sections for state in tree.states)
        for key, reason in reasons.items()
        if not (own and key in _OF_MUON)
    }
    for name, key in _in_groups(paths):
        if key in reasons and (value := value_of(reader, name)):
            yield (
                f"{name} is {value!r:.20}: {reasons[key]}. Leave the optimizer's state out (--weights-only)"
            )
            return


def _unusual(reader: CheckpointReader, paths: Mapping[str, TreePath]) -> Iterator[tuple[str, object]]:
    """The first value of each kind that does not occur in groups of torch's own optimizers."""
    seen = set()
    for name, key in _in_groups(paths):
        if key in _TABLE["groups"]["plain"] or key in seen:
            continue
        value = value_of(reader, name)
        if value is not None and value is not _TABLE["groups"]["usual"].get(key):
            seen.add(key)
            yield name, value
