"""Which tree an optimizer is given: a plan's arrays as they are, or the model's own parameters.

An elementwise optax transformation may run on the arrays of the train state: with the shard_map engine one flat array a
unit, with the pjit engine ``{path: parameter}``. One that looks at shapes or names of parameters (Muon, a mask by
``ndim``, a label of one layer) would train as something else there, without a word, and gets parameters
(``logical.py``). Which of the two an optimizer needs shows in its programs: ``init`` and ``update`` are traced over the
engine's arrays and over the model's own tree, with all names and the real shapes, and every parameter's update and
moments are compared as terms (``terms.py``). Branches for later steps are in the programs, so they count from the
start::

    model's tree    {"layers": {"0": {"kernel": [3, 4], "bias": [4]}}}      {"layers/0": [17]}    engine's arrays
                                    | trace                                     | trace
                                    v                                           v
                                 terms                equal?                  terms

Nothing is compiled and nothing is run. Time grows with the number of parameters times the operations on each, and four
fifths of the time is JAX's own tracing of the optimizer: on one core adamw takes 1.5 s for 433 parameters and Muon,
which needs a third trace, 9 s. Programs that are equal but do not show it get the model's own parameters: slower, and
as right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from bridge.core.formats.tensors.gc_pause import collection_paused
from jax_impl.optimizer.forms import Form, ModelTree, StoredArray, forms_of, taking_loss
from jax_impl.optimizer.terms import Owner, Reader, Terms, Value

_AMBIGUOUS = (
    "optimizer: expected masks and labels that mean the same parameters in nnx.state(model, nnx.Param) and in "
    "nnx.as_pure of it, got ones that differ: in the first each path ends with '.value', in the second with the "
    "parameter's own name, and flax's nnx.Optimizer gives both. Compare the names of dictionary keys only: [entry.key "
    "for entry in path if isinstance(entry, jax.tree_util.DictKey)]"
)
# Where a leaf of an optimizer's state is: what comes before and after an array's own keys, and the array.
Slot = tuple[str, str]
KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Reading:
    """What an optimizer does to the arrays of one tree.

    ``owned``: of the state's leaves that belong to an array, by slot and array, the value that ``init`` makes and the
    one that ``update`` does; also of the updates, which have a slot of their own. ``shared``: of all other leaves, by
    key path.
    """

    owners: Mapping[str, Owner]
    owned: Mapping[tuple[Slot, str], tuple[Value, Value]]
    shared: Mapping[str, tuple[Value, Value]]

    def equals(self, other: Reading) -> bool:
        """Whether each array's update and moments are those of all parameters in it in ``other``."""
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
    """Whether array ``name`` has this value where parameter ``path`` has that one."""
    if mine.owner is None and not mine.filled and name != path:
        # Elements of a parameter do not lie in such an array as they do in the parameter.
        return False
    return mine.term == theirs.term and (mine.owner, theirs.owner) in ((None, None), (name, path))


# Several steps of one plan (other microbatches, another loss) need one reading, which takes seconds: 1.5 s
# for adamw over 433 parameters. An optimizer compares by its functions.
@functools.lru_cache(maxsize=16)
@collection_paused()
def chosen_form(
    optimizer: optax.GradientTransformation,
    arrays: tuple[StoredArray, ...],
    models: tuple[ModelTree, ...],
    flat: bool,
) -> str | None:
    """None where the optimizer may run on the engine's arrays; else which of ``forms_of`` it is to be given.

    ``flat``: whether the engine's arrays are flat ones.

    Raises ``ValueError`` for an optimizer that can update neither, and for one whose masks or labels mean other
    parameters in ``nnx.state(model)`` than in ``nnx.as_pure`` of it.
    """
    terms, parameters = Terms(), _owners_of_parameters(arrays)
    # Parameters are under their units in the pjit engine's arrays, too.
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
        # The optimizer was made for the engine's arrays.
        return None
    boxed = reading("boxed") if "boxed" in forms else None
    if boxed is not None and not boxed.equals(expected):
        raise ValueError(_AMBIGUOUS)
    if own is not None and own.equals(expected):
        return None
    # States by name are named alike whatever the model's own tree is, so this form comes before the tree.
    by_name = reading("name")
    return "name" if by_name is not None and by_name.equals(expected) else first


def _owners_of_arrays(arrays: Sequence[StoredArray], flat: bool) -> dict[str, Owner]:
    """By names that no parameter has, where arrays are flat."""
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
    """``form`` None: of a dictionary of the owners' arrays. Raises what the optimizer raises."""

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
    # Each step finds in padding what the step before left there, so padding that changes is not known.
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
            # A state that becomes another one in each step is read no further, and equals none.
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
    """The programs of ``init`` and of the first steps, and the state's shapes. None: a step that cannot be read."""
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
        # Moments may become float32 in the first step, which the steps after it are given.
        again, (_, later) = jax.make_jaxpr(update, return_shape=True)(gradients, after, weights, loss)
        alike = shapes(state) == shapes(after)
        steps += [again] if alike and _same_avals(after, later) else [None]
    if shapes(updated) != shapes(gradients):
        raise ValueError("expected updates like the gradients")
    return init, steps, state


def _and_then(terms: Terms, first: Value, later: Value | None) -> Value:
    """What the first step makes, and what the later ones make."""
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
    """What a step finds in a leaf of the state."""
    slot, name = slot_and_name
    if name is None:
        return Value(terms.number("state", slot), filled=leaf.shape == ())
    if leaf.shape == owners[name].shape:
        return Value(terms.number("state", slot), name, padding=padding)
    return Value(terms.number("state", slot, name), filled=leaf.shape == ())


def _slots(
    names: Mapping[KeyPath, str], shapes: Mapping[str, Any], state: Any
) -> list[tuple[Slot, str | None]]:
    """Where each leaf of a state is, and the array that it belongs to.

    It belongs to the array whose key path is in its own; of a state that is a list, to the array in whose turn it
    comes. A wrong guess does no harm: programs that differ for it are not equal.
    """
    lengths = sorted({len(path) for path in names if path}, reverse=True)
    slots: list[tuple[Slot, str | None]] = []
    leaves = jax.tree.leaves_with_path(state)
    for path, leaf in leaves:
        # The longest path that is known, and of equally long ones the innermost.
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
    """The slot of a leaf whose path has an array's keys with others between them; of no array's, its own path."""
    for known in sorted(names, key=len, reverse=True):
        rest, keys = [], list(known)
        for entry in path:
            if keys and entry == keys[0]:
                keys.pop(0)
            else:
                rest.append(entry)
        if not keys and len(known) > 1 and leaf.shape == shapes[names[known]]:
            return ("", jax.tree_util.keystr(tuple(rest))), names[known]
    # In nnx.State and in nnx.as_pure of it this is the same place.
    own = path[:-1] if path[-1:] == (jax.tree_util.GetAttrKey("value"),) else path
    return (jax.tree_util.keystr(own), ""), None


def _same_avals(before: Any, after: Any) -> bool:
    avals = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    return avals[0] == avals[1] and bool(structures[0] == structures[1])


def _cannot(error: BaseException | None, flat: bool) -> str:
    trees = "one flat array a unit, by unit" if flat else "{path: array}"
    return (
        f"optimizer: expected a transformation that updates {trees}, or the tree of the model's parameters, from "
        f"gradients, state, weights and the loss alone, got {type(error).__name__}: {str(error)[:500]}"
    )
