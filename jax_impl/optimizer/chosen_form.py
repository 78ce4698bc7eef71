"""Choose the tree that an optimizer gets: a plan's arrays as stored, or the model's own parameters.

An elementwise optax transformation may run on the arrays of the train state: one flat array per unit with the shard_map
engine, ``{path: parameter}`` with the pjit engine. An optimizer that looks at shapes or names of parameters (Muon, a
mask by ``ndim``, a label of one layer) would silently train differently there, so it gets parameters (``logical.py``).
The traced programs show which tree an optimizer needs: ``init`` and ``update`` are traced over the engine's arrays and
over the model's own tree, with all names and the real shapes, and every parameter's update and moments are compared as
terms (``terms.py``). The programs contain branches for later steps, so these branches count from the start::

    model's tree    {"layers": {"0": {"kernel": [3, 4], "bias": [4]}}}      {"layers/0": [17]}    engine's arrays
                                    | trace                                     | trace
                                    v                                           v
                                 terms                equal?                  terms

Nothing is compiled or run. The time grows with the number of parameters times the operations on each; four fifths of
the time is JAX's own tracing of the optimizer. On one core, 433 parameters take 1.5 s for adamw and 9 s for Muon, which
needs a third trace. If two programs are equal but the comparison cannot show that, the optimizer gets the model's own
parameters, which is slower but also right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from bridge.core.long_calls import collection_paused
from jax_impl.optimizer.forms import Form, ModelTree, StoredArray, forms_of, taking_loss
from jax_impl.optimizer.terms import Owner, Reader, Terms, Value

_AMBIGUOUS = (
    "optimizer: expected masks and labels that select the same parameters in nnx.state(model, nnx.Param) and in its "
    "nnx.as_pure, got masks or labels that differ: each path ends with '.value' in the first, and with the "
    "parameter's own name in the second, and flax's nnx.Optimizer uses both. Compare only the names of dictionary "
    "keys: [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]"
)
# The position of a leaf in an optimizer's state: the key path before and after the keys of its array.
Slot = tuple[str, str]
KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Reading:
    """The effect of an optimizer on the arrays of one tree.

    ``owned``: for the state's leaves that belong to an array, by slot and array, the value after ``init`` and the value
    after ``update``; also for the updates, which have a separate slot. ``shared``: for all other leaves, by key path.
    """

    owners: Mapping[str, Owner]
    owned: Mapping[tuple[Slot, str], tuple[Value, Value]]
    shared: Mapping[str, tuple[Value, Value]]

    def equals(self, other: Reading) -> bool:
        """Whether each array's update and moments equal the ones of all its parameters in ``other``."""
        pairs = [(name, path) for name, owner in self.owners.items() for path in owner.paths]
        slots = {slot for slot, _ in (*self.owned, *other.owned)}
        return (
            all(
                _equal_pairs(self.owned.get((slot, name)), other.owned.get((slot, path)), name, path)
                for name, path in pairs
                for slot in slots
            )
            and self.shared.keys() == other.shared.keys()
            and all(_equal_pairs(pair, other.shared[key], "", "") for key, pair in self.shared.items())
        )


def _equal_pairs(
    mine: tuple[Value, Value] | None, theirs: tuple[Value, Value] | None, name: str, path: str
) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return all(_equal(own, other, name, path) for own, other in zip(mine, theirs, strict=True))


def _equal(mine: Value, theirs: Value, name: str, path: str) -> bool:
    """Whether the value ``mine`` of array ``name`` matches the value ``theirs`` of parameter ``path``."""
    if mine.owner is None and not mine.filled and name != path:
        # A parameter's elements have other positions in such an array than in the parameter.
        return False
    return mine.term == theirs.term and (mine.owner, theirs.owner) in ((None, None), (name, path))


# Several steps of one plan (other microbatches, another loss) share one reading, because a reading takes seconds: 1.5 s
# for adamw over 433 parameters. Optimizers are compared by their functions.
@functools.lru_cache(maxsize=16)
@collection_paused()
def chosen_form(
    optimizer: optax.GradientTransformation,
    arrays: tuple[StoredArray, ...],
    models: tuple[ModelTree, ...],
    flat: bool,
) -> str | None:
    """None if the optimizer may run on the engine's arrays; else the name of the form in ``forms_of`` that it gets.

    ``flat``: whether the engine's arrays are flat.

    Raises ``ValueError`` for an optimizer that can update neither tree, and for one whose masks or labels select other
    parameters in ``nnx.state(model)`` than in its ``nnx.as_pure``.
    """
    terms, parameters = Terms(), _owners_of_parameters(arrays)
    # The pjit engine's arrays also group parameters by unit.
    forms = forms_of(arrays, models, units=flat)

    @functools.cache
    def reading(name: str) -> Reading | None:
        return _try_reading(terms, optimizer, forms[name], parameters)[0]

    own, failure = _try_reading(terms, optimizer, None, _owners_of_arrays(arrays, flat))
    first = next((name for name in forms if reading(name) is not None), None)
    expected = None if first is None else reading(first)
    if first is None or expected is None:
        if own is None:
            raise ValueError(_cannot(failure, flat)) from failure
        # The optimizer was built for the engine's arrays.
        return None
    boxed = reading("boxed") if "boxed" in forms else None
    if boxed is not None and not boxed.equals(expected):
        raise ValueError(_AMBIGUOUS)
    if own is not None and own.equals(expected):
        return None
    # States by name have the same names for every kind of model tree, so prefer this form to the tree.
    by_name = reading("name")
    return "name" if by_name is not None and by_name.equals(expected) else first


def _owners_of_arrays(arrays: Sequence[StoredArray], flat: bool) -> dict[str, Owner]:
    """Owners by name; the names of flat arrays differ from all parameter names."""
    named = {f"array {array.key}" if flat else array.key: array for array in arrays}
    return {
        name: Owner(name, array.key, frozenset(array.paths), array.shape, array.dtypes, array.padded)
        for name, array in named.items()
    }


def _owners_of_parameters(arrays: Sequence[StoredArray]) -> dict[str, Owner]:
    return {
        path: Owner(path, path, frozenset([path]), shape, array.dtypes)
        for array in arrays
        for path, shape in zip(array.paths, array.shapes, strict=True)
    }


def _try_reading(
    terms: Terms, optimizer: optax.GradientTransformation, form: Form | None, owners: Mapping[str, Owner]
) -> tuple[Reading | None, Exception | None]:
    try:
        return _read(terms, optimizer, form, owners), None
    except Exception as error:
        return None, error


def _read(
    terms: Terms, optimizer: optax.GradientTransformation, form: Form | None, owners: Mapping[str, Owner]
) -> Reading:
    """``form`` None: read over a dictionary of the owners' arrays. Raises the optimizer's own errors."""

    def tree(leaf_of: Callable[[Owner], Any]) -> Any:
        leaves = {owner.key: leaf_of(owner) for owner in owners.values()}
        return leaves if form is None else form.pack(leaves)

    weights = tree(lambda owner: jax.ShapeDtypeStruct(owner.shape, owner.dtypes[0]))
    gradients = tree(lambda owner: jax.ShapeDtypeStruct(owner.shape, owner.dtypes[1]))
    names: list[str] = jax.tree.leaves(tree(lambda owner: owner.name))
    of = [owners[name] for name in names]
    init, steps, state = _programs(optimizer, weights, gradients)
    reader = Reader(terms, owners)
    paths = [path for path, _ in jax.tree.leaves_with_path(weights)]
    slots = _slots(dict(zip(paths, names, strict=True)), {name: owners[name].shape for name in names}, state)
    before = [_of_each(terms, "weight", owner) for owner in of]
    first = reader.outputs(init, before)
    # Each step sees the padding that the previous step left, so padding that changes is unknown.
    padding = [value.padding for value in first]
    while True:
        kept = [
            _of_slot(terms, slot, owners, leaf, pad)
            for slot, leaf, pad in zip(slots, jax.tree.leaves(state), padding, strict=True)
        ]
        slopes = [_of_each(terms, "gradient", owner) for owner in of]
        inputs = [*slopes, *kept, *before, Value(terms.number("loss"), filled=True)]
        values = reader.outputs(steps[0], inputs)
        for later_step in steps[1:]:
            # A state that changes its type in each step is not read further, and equals no other.
            after_it = [None] * len(values) if later_step is None else reader.outputs(later_step, inputs)
            values = [_and_then(terms, *pair) for pair in zip(values, after_it, strict=True)]
        updates, last = values[: len(names)], values[len(names) :]
        stays = [pad if pad == value.padding else None for pad, value in zip(padding, last, strict=True)]
        if stays == padding:
            break
        padding = stays
    owned = {(("update", ""), name): (value, value) for name, value in zip(names, updates, strict=True)}
    shared: dict[str, tuple[Value, Value]] = {}
    for (slot, name), made, updated in zip(slots, first, last, strict=True):
        if name is None:
            shared["".join(slot)] = made, updated
        else:
            owned[slot, name] = made, updated
    return Reading(owners, owned, shared)


def _programs(
    optimizer: optax.GradientTransformation, weights: Any, gradients: Any
) -> tuple[Any, list[Any], Any]:
    """The programs of ``init`` and of the first steps (None for a step that cannot be read), and the state's shapes."""
    able = taking_loss(optimizer)
    loss = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(float))

    def update(gradients: Any, state: Any, weights: Any, loss: Any) -> Any:
        return able.update(gradients, state, weights, value=loss)

    def shapes(tree: Any) -> list[Any]:
        return [leaf.shape for leaf in jax.tree.leaves(tree)]

    init, state = jax.make_jaxpr(able.init, return_shape=True)(weights)
    step, (updated, after) = jax.make_jaxpr(update, return_shape=True)(gradients, state, weights, loss)
    steps: list[Any] = [step]
    if not _same_avals(state, after):
        # The first step may turn moments into float32, which the following steps get as input.
        again, (_, later) = jax.make_jaxpr(update, return_shape=True)(gradients, after, weights, loss)
        alike = shapes(state) == shapes(after)
        steps += [again] if alike and _same_avals(after, later) else [None]
    if shapes(updated) != shapes(gradients):
        raise ValueError("expected updates like the gradients")
    return init, steps, state


def _and_then(terms: Terms, first: Value, later: Value | None) -> Value:
    """The value of the first step, combined with the value of the later steps."""
    if later is None or (first.owner, first.filled) != (later.owner, later.filled):
        return Value(terms.number("another state", object()))
    padding = first.padding if first.padding == later.padding else None
    return Value(terms.number("then", first.term, later.term), first.owner, first.filled, padding)


def _of_each(terms: Terms, name: str, owner: Owner) -> Value:
    return Value(terms.number(name), owner.name, padding="zero" if owner.padded else None)


def _of_slot(
    terms: Terms,
    slot_and_name: tuple[Slot, str | None],
    owners: Mapping[str, Owner],
    leaf: Any,
    padding: str | None,
) -> Value:
    """The value that a step finds in a leaf of the state."""
    slot, name = slot_and_name
    if name is None:
        return Value(terms.number("state", slot), filled=leaf.shape == ())
    if leaf.shape == owners[name].shape:
        return Value(terms.number("state", slot), name, padding=padding)
    return Value(terms.number("state", slot, name), filled=leaf.shape == ())


def _slots(
    names: Mapping[KeyPath, str], shapes: Mapping[str, Any], state: Any
) -> list[tuple[Slot, str | None]]:
    """The slot of each leaf of a state, and the array to which the leaf belongs.

    A leaf belongs to the array whose key path is part of the leaf's path; in a list, to the array at the same position.
    A wrong guess is harmless: programs that differ because of it do not compare equal.
    """
    lengths = sorted({len(path) for path in names if path}, reverse=True)
    slots: list[tuple[Slot, str | None]] = []
    leaves = jax.tree.leaves_with_path(state)
    for path, leaf in leaves:
        # The longest known path; among equally long ones, the innermost.
        parts = ((i, i + n) for n in lengths for i in reversed(range(len(path) - n + 1)))
        first, last = next((part for part in parts if path[slice(*part)] in names), (len(path), len(path)))
        name = names.get(path[first:last]) if first < last else None
        slot = jax.tree_util.keystr(path[:first]), jax.tree_util.keystr(path[last:])
        if name is None:
            slot, name = _scattered(names, shapes, path, leaf)
        slots.append((slot, name))
    runs = 0
    for start in range(len(leaves) - len(names) + 1):
        run = slice(start, start + len(names))
        in_turn = zip(slots[run], leaves[run], names.values(), strict=True)
        if names and all(name is None and x.shape == shapes[own] for (_, name), (_, x), own in in_turn):
            slots[run] = [(("in turn", str(runs)), own) for own in names.values()]
            runs += 1
    return slots


def _scattered(
    names: Mapping[KeyPath, str], shapes: Mapping[str, Any], path: KeyPath, leaf: Any
) -> tuple[Slot, str | None]:
    """The slot of a leaf whose path contains an array's keys with other keys between them; else the leaf's own path."""
    for known in sorted(names, key=len, reverse=True):
        rest, keys = [], list(known)
        for entry in path:
            if keys and entry == keys[0]:
                keys.pop(0)
            else:
                rest.append(entry)
        if not keys and len(known) > 1 and leaf.shape == shapes[names[known]]:
            return ("", jax.tree_util.keystr(tuple(rest))), names[known]
    # nnx.State and its nnx.as_pure must give the same slot.
    own = path[:-1] if path[-1:] == (jax.tree_util.GetAttrKey("value"),) else path
    return (jax.tree_util.keystr(own), ""), None


def _same_avals(before: Any, after: Any) -> bool:
    avals = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    return avals[0] == avals[1] and bool(structures[0] == structures[1])


def _cannot(error: BaseException | None, flat: bool) -> str:
    trees = "one flat array per unit, by unit" if flat else "{path: array}"
    return (
        f"optimizer: expected a transformation that updates {trees}, or the tree of the model's parameters, from only "
        f"gradients, state, weights and the loss, got {type(error).__name__}: {str(error)[:500]}"
    )
