"""Which optimizer keeps a state, and whether its numbers mean the same in torch and in optax.

The names of what is kept for a weight tell the optimizer, as far as names can:

    torch    exp_avg, exp_avg_sq, step              Adam, AdamW, RAdam      optax    mu, nu, count
             momentum_buffer                        SGD                              trace

These pairs are equal numbers, so bits are copied. Every other state is refused by the optimizer's name, with the
reason: the formulas were read in the sources of torch 2.13 and optax 0.2.8. `README.md` has the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bridge.formats.base import CheckpointError, CheckpointReader, TreePath
from bridge.mapping.beside_weights import OPTIMIZER_KEYS, WORDS_OF_MOMENTS
from bridge.mapping.conventions import SECTIONS, Convention, Section
from bridge.mapping.found import Found, NameIndex
from bridge.mapping.problems import some


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose state is not translated. words: names of its own in its state. reason: why it is not."""

    name: str
    words: frozenset[str]
    reason: str


def _optimizer(name: str, words: str, reason: str) -> Optimizer:
    return Optimizer(name, frozenset(words.split()), reason)


_AMSGRAD = "torch keeps the largest exp_avg_sq, optax the largest nu / (1 - b2 ** count), and neither tells the other"
_NO_STEP = "torch counts steps, optax does not, and their epsilons are inside and outside of the root"

TORCH: tuple[Optimizer, ...] = (
    _optimizer("Adam with amsgrad=True", "max_exp_avg_sq", _AMSGRAD),
    _optimizer("NAdam", "mu_product", "optax.nadam has a constant b1 in place of torch's growing one"),
    _optimizer(
        "Adamax", "exp_inf", "optax.adamax names it nu, and no name there tells it from Adam's second moment"
    ),
    _optimizer("Adadelta", "acc_delta", "optax.adadelta has no step count, which torch.optim.Adadelta needs"),
    _optimizer(
        "RMSprop",
        "square_avg grad_avg",
        f"{_NO_STEP}; optax.rmsprop's trace contains the learning rates of its past",
    ),
    _optimizer("Adagrad", "sum", f"{_NO_STEP}, and optax starts from another sum"),
    _optimizer("Rprop", "prev step_size", "the two forget the gradient after a change of sign in other ways"),
    _optimizer("ASGD", "ax eta", "optax has no such optimizer"),
    _optimizer(
        "LBFGS", "old_dirs old_stps H_diag prev_flat_grad", "torch keeps it for all weights in one vector"
    ),
    _optimizer(
        "Adafactor",
        "row_var col_var variance exp_avg_sq_row exp_avg_sq_col",
        "the two factor a weight along other axes",
    ),
)
"""By the state's names in torch.optim and, for Adafactor, in transformers."""

OPTAX: tuple[Optimizer, ...] = (
    _optimizer("optax.amsgrad", "nu_max", _AMSGRAD),
    _optimizer("optax.adagrad", "sum_of_squares", f"{_NO_STEP}, and torch starts from another sum"),
    _optimizer(
        "optax.adadelta", "e_g e_x", "optax.adadelta has no step count, which torch.optim.Adadelta needs"
    ),
    _optimizer("optax.rprop", "step_sizes prev_updates", "the two forget the gradient in other ways"),
    _optimizer("optax.adafactor", "v_row v_col v", "the two factor a weight along other axes"),
    _optimizer(
        "optax.contrib.schedule_free",
        "z",
        "torch.optim has no such optimizer, and Adam reads its weights wrongly",
    ),
)

_OPTAX_WORDS = frozenset(word for optimizer in OPTAX for word in optimizer.words)

_ALONE: Mapping[str, Optimizer] = {
    "nu": _optimizer(
        "optax.rmsprop (nu without mu)", "nu", f"{_NO_STEP}; its trace contains past learning rates"
    ),
    "mu": _optimizer(
        "optax.lion or optax.contrib.muon (mu without nu)",
        "mu",
        "torch.optim has no Lion, and its Muon corrects no bias",
    ),
}
"""Optimizers whose state is a part of Adam's."""

_READ_AS: tuple[tuple[Section, str, str], ...] = (
    (
        "exp_avg_sq",
        "mu, nu and count",
        "those of optax.adam, adamw or radam; adamax, nadam, yogi and adabelief keep other numbers under these names",
    ),
    ("momentum_buffer", "trace", "that of optax.sgd, of gradients without the learning rate"),
)

_SUMS_OTHERWISE = {
    "dampening": "momentum_buffer then sums 1 - dampening of each gradient, and optax.trace whole ones",
    "ns_steps": "Muon's momentum_buffer is a mean of gradients, and optax.contrib.muon keeps it as mu, with a count",
}
_OWN_DEPTH = 2
"""Keys before a weight in the state of our own optimizers: ``opt_state/trace/<weight>``."""

CARRIED = frozenset({"acc_grads", "grad_acc", "ema", "found_nan"})
"""What optax keeps beside an optimizer's state: sums of gradients, averages. It comes back as it was."""


@dataclass(frozen=True)
class Refused:
    """Optimizers whose states are not translated. problems: a sentence for each. names: those of their tensors."""

    problems: tuple[str, ...]
    names: frozenset[str]


def refused(
    reader: CheckpointReader,
    paths: Mapping[str, TreePath],
    found: Found,
    target: Convention,
    index: NameIndex,
) -> Refused:
    """The states in ``found`` that mean something else in ``target``, or nothing.

    paths: of the source's objects. index: knows the weights' names.
    """
    tree = found.convention.is_tree
    kept = [*_from_sections(found, crossing=tree != target.is_tree)]
    others = ((info.name, info.path) for info in found.others.values())
    if tree:
        kept += _from_tree(others, index)
    else:
        kept += _from_state_dict((*others, *((name, path) for name, path in paths.items())))
    weights: dict[Optimizer, dict[str, None]] = {}
    for optimizer, weight, _ in kept:
        weights.setdefault(optimizer, {})[weight] = None
    problems = [
        f"{reader.path} has the state of {optimizer.name} ({', '.join(sorted(optimizer.words))} of "
        f"{some([*names])}), which has no equal in {target.name}: {optimizer.reason}. Leave the optimizer's state out "
        f"(--weights-only){_without(optimizer, tree)}"
        for optimizer, names in weights.items()
    ]
    if target.is_tree and not tree and any("momentum_buffer" in state.sections for state in found.states):
        problems += _of_groups(reader, paths, own=len(target.path_of("momentum_buffer")) == _OWN_DEPTH)
    return Refused(tuple(problems), frozenset(name for _, _, name in kept if name))


def remarks(found: Found, target: Convention, kept: Iterable[str]) -> Iterator[str]:
    """What a translation from optax takes for granted. kept: names of tensors that go along under their own names."""
    source = found.convention
    if not source.is_tree or target.is_tree:
        return
    for section, words, meaning in _READ_AS:
        nodes = [n for n, state in enumerate(found.states) if section in state.sections]
        if nodes:
            place = source.name_of(section, "*", nodes[0])
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            yield f"{words} ({place}{more}) read as {meaning}"
    sums = [name for name in kept if not CARRIED.isdisjoint(name.split("/"))]
    if sums:
        yield f"kept as they are, in the layout of {source.name}, which {target.name} does not read: {some(sums)}"


def _without(optimizer: Optimizer, tree: bool) -> str:
    if optimizer.reason != _AMSGRAD:
        return ""
    (word,) = optimizer.words
    return f", or the maximum alone, to go on as Adam (--drop '{f'*/{word}/*' if tree else f'*.{word}'}')"


def _from_sections(found: Found, crossing: bool) -> Iterator[tuple[Optimizer, str, str]]:
    """Optimizer, weight and "" for each state among those that have the names of translated ones."""
    for state in found.states:
        if crossing:
            optimizer = (OPTAX if found.convention.is_tree else TORCH)[0]
            yield from ((optimizer, weight, "") for weight in state.sections.get("max_exp_avg_sq", ()))
        if not found.convention.is_tree:
            continue
        first, second = (state.sections.get(section, {}) for section in ("exp_avg", "exp_avg_sq"))
        if not first or not second:
            word = "mu" if first else "nu"
            yield from ((_ALONE[word], weight, "") for weight in (*first, *second))


def _from_tree(
    others: Iterable[tuple[str, TreePath]], index: NameIndex
) -> Iterator[tuple[Optimizer, str, str]]:
    for name, path in others:
        if path[0] not in OPTIMIZER_KEYS:
            continue
        keys = [str(key) for key in path]
        start = next((k for k in range(2, len(keys)) if _knows(index, keys[k:])), None)
        if start is None or not (CARRIED | WORDS_OF_MOMENTS).isdisjoint(keys[:start]):
            continue
        # A tree of weights may have a root of its own below the word: v_row/params/...
        word = next((key for key in keys[1:start] if key in _OPTAX_WORDS), keys[start - 1])
        yield _named(OPTAX, word, "optax"), "/".join(keys[start:]), name


def _knows(index: NameIndex, keys: list[str]) -> bool:
    return index.knows("/".join(keys)) or (keys[-1] == "value" and index.knows("/".join(keys[:-1])))


def _from_state_dict(others: Iterable[tuple[str, TreePath]]) -> Iterator[tuple[Optimizer, str, str]]:
    for name, path in others:
        keys = [str(key) for key in path]
        if "state" in keys[1:-2]:
            place = keys.index("state", 1)
            weight, word = keys[place + 1], keys[place + 2]
        else:
            before, _, word = ".".join(keys).rpartition(".")
            _, state, weight = f".{before}".rpartition(".state.")
            if not state:
                continue
        if word not in SECTIONS:
            yield _named(TORCH, word, "torch"), weight, name


def _named(known: tuple[Optimizer, ...], word: str, library: str) -> Optimizer:
    unknown = _optimizer(
        "another optimizer", word, f"{word} is no name that Adam, AdamW, RAdam or SGD of {library} give"
    )
    return next((optimizer for optimizer in known if word in optimizer.words), unknown)


def _of_groups(reader: CheckpointReader, paths: Mapping[str, TreePath], own: bool) -> Iterator[str]:
    """Problems of groups of weights whose momentum_buffer is no sum of gradients, as optax.trace is.

    own: the target's state is that of our own optimizers, which have no chain, and keep Muon's as torch does.
    """
    for name, path in paths.items():
        key = str(path[-1]).rpartition(".")[2]
        if key not in _SUMS_OTHERWISE or not any("param_groups" in str(part) for part in path):
            continue
        if key == "ns_steps" and own:
            continue
        try:
            value = reader.objects[name]
        except CheckpointError:
            continue
        if value:
            yield (
                f"{name} is {value!r:.20}: {_SUMS_OTHERWISE[key]}. Leave the optimizer's state out (--weights-only)"
            )
            return
