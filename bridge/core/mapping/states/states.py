"""Translation of optimizer states: the target's state for each weight's moments, and its step count.

    torch                                          optax
    optimizer.state.<w>.exp_avg, .exp_avg_sq       <state>/mu/<w>, <state>/nu/<w>
    optimizer.state.<w>.step    (each)             <state>/count   (one for all weights of the state)

If a source has several states, as made by optax's `partition`, each weight is in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.core.formats.tensors.base import CheckpointReader, TensorInfo
from bridge.core.mapping.fit.problems import NAMES, Problems
from bridge.core.mapping.language.conventions import (
    ADAM,
    BY_WEIGHT,
    MOMENTS,
    SCALES,
    Convention,
    Section,
    State,
    tree_places,
)
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.relation import identity
from bridge.core.mapping.one_rule.instance import View
from bridge.core.mapping.states import beside_weights
from bridge.core.mapping.states.source_tree import SourceTree, Tensors
from bridge.core.text import first_of

Content = View | np.ndarray
Outputs = Mapping[Section, Mapping[str, View]]


def merged(tree: SourceTree, problems: Problems) -> dict[Section, Tensors]:
    """Moments and scales of all states by section and weight. Two of the same kind for one weight are a problem."""
    sections: dict[Section, Tensors] = {section: {} for section in (*BY_WEIGHT, "step")}
    for state in tree.states:
        for section, tensors in state.sections.items():
            for weight, info in tensors.items():
                other = sections[section].setdefault(weight, info)
                if other is not info:
                    problems.add(
                        f"expected one {section} of a weight, got two of {NAMES}",
                        f"{weight} ({other.name}, {info.name})",
                    )
    return sections


def of_other_shapes(tree: SourceTree, where: str, problems: Problems) -> frozenset[str]:
    """The names of moments that do not have one number for each element of their weight, which is a problem."""
    names = [
        info.name
        for state in tree.states
        for moment in MOMENTS
        for weight, info in state.sections.get(moment, {}).items()
        if weight in tree.weights and tree.weights[weight].shape != info.shape
    ]
    if names:
        problems.append(
            f"{where} has moments with other shapes than their weights ({first_of(names)}), as GaLore, NovoGrad and "
            "Adam-mini keep them, and no rule tells which elements the moments belong to. Leave the optimizer's "
            "state out (--weights-only)"
        )
    return frozenset(names)


def require_whole(tree: SourceTree, usual: Convention, where: str, problems: Problems) -> None:
    """Check that each state is complete: scales with their moment, Adam's with both moments and, with steps, a step.

    usual: the convention with its usual places, where a step count without moments may be.
    """
    source = tree.convention
    missing = []
    for number, state in enumerate(tree.states):
        for section, scale in SCALES.items():
            missing += [
                source.name_of(section, weight, number)
                for weight in state.sections.get(scale, ())
                if weight not in state.sections.get(section, ())
            ]
        needed: tuple[Section, ...] = ADAM if source.one_step else (*ADAM, "step")
        with_adam = dict.fromkeys(w for s in (*ADAM, "max_exp_avg_sq") for w in state.sections.get(s, ()))
        # Steps also count for weights with only momentum.
        counted = state.sections.get("step", ()) if "step" in needed else ()
        with_adam |= dict.fromkeys(w for w in counted if w not in state.sections.get("momentum_buffer", ()))
        missing += [
            source.name_of(section, weight, number)
            for weight in with_adam
            for section in needed
            if weight not in state.sections.get(section, ())
        ]
        if source.one_step and with_adam and state.count is None:
            name = source.name_of("step", state=number)
            problems.append(f"expected {name} with the moments in {where}, found none")
    missing = list(dict.fromkeys(missing))
    if missing:
        problems.append(
            f"expected the whole optimizer state of each weight in {where}, but {first_of(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    if source.one_step and not tree.states and (count := usual.name_of("step")) in tree.others:
        moments = " and ".join(usual.name_of(section, "*") for section in ADAM)
        problems.append(
            f"expected moments ({moments}) with the {count} in {where}, found none. If that counts something else, "
            f"such as a schedule's steps, leave it out (--drop {count})"
        )


def like_source(source: Convention, target: Convention) -> Convention:
    """The target with the states of a source of the same kind, so that chain and optimizer key are equal."""
    if source.is_tree != target.is_tree or not source.states:
        return target
    if not source.is_tree:
        return replace(target, states=source.states)
    inner = target.states[0].places["exp_avg"].rpartition("mu/")[2]
    nodes = [state.places["exp_avg"].rpartition("mu/")[0] for state in source.states]
    return replace(target, states=tuple(State(tree_places(node, inner, "")) for node in nodes))


@dataclass(frozen=True)
class StatePlan:
    """The contents of a target's states. outputs: for each section of moments, the views of its weights.

    kept: whether each state of the target corresponds to a state of the source.
    """

    reader: CheckpointReader
    tree: SourceTree
    target: Convention
    outputs: Outputs
    kept: bool

    def tensors(self, problems: Problems) -> Iterator[tuple[Section, str, int, Content]]:
        """As (section, weight, number of the state, content). A step count for a whole state has no weight."""
        origin: dict[str, tuple[int, str]] = {}
        for number, state in enumerate(self.tree.states):
            for section in BY_WEIGHT:
                for weight, info in state.sections.get(section, {}).items():
                    origin[info.name] = number, weight
        sources: dict[str, dict[tuple[int, str], None]] = {}
        for section in BY_WEIGHT:
            for weight, view in self.outputs.get(section, {}).items():
                origins = [origin[name] for name in dict.fromkeys(block.source for block in view.blocks)]
                if section in (*ADAM, "momentum_buffer"):
                    sources.setdefault(weight, {}).update(dict.fromkeys(origins))
                yield section, weight, self._state(weight, origins, problems), view
        yield from self._steps(sources, problems)

    def _state(self, weight: str, sources: Sequence[tuple[int, str]], problems: Problems) -> int:
        if not self.kept:
            return self.target.state_of(weight)
        numbers = sorted({number for number, _ in sources})
        if len(numbers) > 1:
            names = " and ".join(self.tree.convention.name_of("exp_avg", "*", number) for number in numbers)
            problems.add(
                f"expected the moments of {NAMES} from one optimizer state, got them from {names}", weight
            )
        return numbers[0] if numbers else 0

    def _steps(
        self, sources: Mapping[str, Mapping[tuple[int, str], None]], problems: Problems
    ) -> Iterator[tuple[Section, str, int, Content]]:
        due: dict[tuple[int, str], dict[str, TensorInfo]] = {}
        for weight, of_weight in sources.items():
            number = self._state(weight, list(of_weight), Problems())
            key = (number, "" if self.target.one_step else weight)
            infos = due.setdefault(key, {})
            for state, source in of_weight:
                info = self._step(state, source)
                if info is not None:
                    infos[info.name] = info
        for (number, weight), infos in due.items():
            if not infos:
                continue
            try:
                yield "step", weight, number, self._content(list(infos.values()), number, weight)
            except MappingError as error:
                problems.raised(error)

    def _step(self, state: int, weight: str) -> TensorInfo | None:
        section = self.tree.states[state]
        return (
            section.count if self.tree.convention.one_step else section.sections.get("step", {}).get(weight)
        )

    def _content(self, infos: Sequence[TensorInfo], number: int, weight: str) -> Content:
        name = self.target.name_of("step", weight, number)
        if self.tree.convention.one_step == self.target.one_step and len(infos) == 1:
            return identity(infos[0].name, infos[0].shape, infos[0].dtype)
        step = beside_weights.one_step(self.reader, infos, name, whole=self.tree.convention.one_step)
        return np.asarray(step, np.int32 if self.target.one_step else np.float32)
