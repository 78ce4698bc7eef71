"""The update, one array of weights after another; arrays in host memory are on the device only for their turn.

If the whole state is in host memory, including step counts, the host's processor updates it. XLA:TPU runs that update
as one host program, which changes weights and moments in place and reads gradients from the device. That program has no
collectives, so each device's part of an array is updated separately.

An optimizer's update is traced once. If the optimizer treats all elements alike, the computation of each key's new
weights and moments is a separate part of the program; computations for several keys (step counts, a global norm of
gradients) come first. A fence separates two keys, so that only one key's temporary arrays exist at a time. Arrays in
host memory travel while other keys are computed::

    in        | key 0 | key 1 | key 2         | key 3
    update            | 0     | 1             | 2
    out                       | key 0         | key 1

Key i + 1 is fetched, and key i updated, when key i - 1 is back in host memory. So at most two keys have arrays on the
device, and one of them twice, while the transferred parts of an array are joined.

XLA's schedulers drop barriers, move transfers to the front and wait for transfers only at the end. So data dependences
enforce the order: an element of the sent array is read, and the start offsets of the next array's parts depend on this
element. XLA cannot see that every element gives the same offsets (``_landed``, ``memory_kinds.fetch_after``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.comm.collectives import fence
from jax_impl.runtime.groups.memory_kinds import as_before, fetch_after, in_host, is_on_device, on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.program.traced import (
    Env,
    Values,
    evaluate,
    inline_calls,
    operands,
    read,
    runs_any,
    variables,
)

Update = Callable[[Buffers, Any, Buffers, jax.Array], tuple[Any, Buffers]]
"""``(gradients, optimizer state, weights, loss) -> (optimizer state, weights)``."""


def update_in_turn(
    plan: ShardingPlan,
    update: Update,
    gradients: Buffers,
    opt_state: Any,
    weights: Buffers,
    loss: jax.Array,
    shardings: tuple[Any, Any],
) -> tuple[Any, Buffers]:
    """``update(gradients, opt_state, weights, loss)``; results of arrays in host memory are in host memory again.

    ``shardings``: of ``opt_state`` and of ``weights``. An update that needs the moments or weights of several keys at
    once (Muon's parameters of a unit, trust ratios of a global norm) runs as a whole, with all arrays on the device. If
    the whole state is on the host, raises ``ValueError`` for such updates and one that needs other devices' parts.
    """
    state = (opt_state, weights)
    keys = [key_of(plan, path, leaf) for path, leaf in jax.tree.leaves_with_path(state)]
    # All keys may use a step count, which may be in either memory.
    leaves = [
        leaf if key is not None else on_device(leaf)
        for leaf, key in zip(jax.tree.leaves(state), keys, strict=True)
    ]
    on_host = lies_on_host(plan, *state)
    program, structure = _traced(update, gradients, state, loss)
    others = [*jax.tree.leaves(gradients), loss]
    turns = None
    if jax.tree.structure(state) == structure:
        turns = _Turns.of(program, len(others), keys, [key for key in plan.arrays if key in keys])
    elif not on_host:
        return update(gradients, *on_device(state), loss)
    if on_host and (turns is None or not turns.are_local()):
        raise ValueError(
            "update on the host: expected an optimizer that treats all elements alike, and each array of weights "
            "separately, got one that needs several arrays of weights at once, or data of other devices: use "
            "Offload(..., update='device'), which keeps step counts on the device"
        )
    if turns is None:
        return as_before(update(gradients, *on_device(state), loss), state)
    if on_host:
        new = turns.run_on_host(others, leaves)
    else:
        stream = Stream(plan.mesh, [sharding.spec for sharding in jax.tree.leaves(shardings)])
        new = turns.run(others, leaves, stream)
    return jax.tree.unflatten(structure, as_before(new, jax.tree.leaves(state)))


def lies_on_host(plan: ShardingPlan, opt_state: Any, weights: Buffers) -> bool:
    """Inside a program: whether the whole state, with step counts, is in host memory, so that the host updates it."""
    state = opt_state, weights
    has_counts = any(key_of(plan, path, leaf) is None for path, leaf in jax.tree.leaves_with_path(state))
    return has_counts and not any(map(is_on_device, jax.tree.leaves(state)))


def key_of(plan: ShardingPlan, path: tuple[Any, ...], leaf: Any) -> str | None:
    """The key of the weights to which an array of a train state belongs; None if it belongs to no single key."""
    located = plan.locate_buffer(path, leaf)
    if located is None:
        return None
    key, _ = located
    if key in plan.arrays:
        return key
    # Scales and parts of an array append their own names to the array's key or to a parameter's path.
    name = key if key in plan.parameters else key.rpartition(" (")[0]
    return name if name in plan.arrays else plan.parameters[name].key


def _traced(
    update: Update, gradients: Buffers, state: tuple[Any, Buffers], loss: jax.Array
) -> tuple[ClosedJaxpr, Any]:
    """The update as a program of gradients, loss and state, all on the device, and the structure of its results."""

    def run(gradients: Buffers, loss: jax.Array, state: tuple[Any, Buffers]) -> tuple[Any, Buffers]:
        return update(gradients, *state, loss)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)),
        (gradients, loss, state),
    )
    program, results = jax.make_jaxpr(run, return_shape=True)(*shapes)
    return inline_calls(program), jax.tree.structure(results)


@dataclass(frozen=True)
class _Turns:
    """``shared``: equations that belong to no single key. ``own``: equations by key, in the order of the weights.

    ``keys``: the key of each leaf of the state.
    """

    program: ClosedJaxpr
    keys: Sequence[str | None]
    shared: Sequence[Any]
    own: dict[str, list[Any]]

    @staticmethod
    def of(
        program: ClosedJaxpr, others: int, keys: Sequence[str | None], order: Sequence[str]
    ) -> _Turns | None:
        """``others``: the number of inputs before the state. Returns None if keys cannot be updated one by one."""
        jaxpr = program.jaxpr
        # The only key that uses a variable, or None for several.
        users: dict[Any, str | None] = {}

        def use(atoms: Sequence[Any], key: str | None) -> None:
            for variable in operands(atoms):
                users[variable] = key if users.get(variable, key) == key else None

        for variable, key in zip(jaxpr.outvars, keys, strict=True):
            use([variable], key)
        shared: list[Any] = []
        own: dict[str, list[Any]] = {key: [] for key in order}
        for equation in reversed(jaxpr.eqns):
            made = {users[variable] for variable in equation.outvars if variable in users}
            if not made and not equation.effects:
                continue
            key = made.pop() if len(made) == 1 and not equation.effects else None
            use(equation.invars, key)
            (shared if key is None else own[key]).append(equation)
        for variable, key in zip(jaxpr.invars[others:], keys, strict=True):
            if key is not None and users.get(variable, key) != key:
                return None
        return _Turns(program, keys, shared[::-1], {key: equations[::-1] for key, equations in own.items()})

    def run(self, others: Sequence[Any], leaves: Sequence[Any], stream: Stream) -> list[Any]:
        """The new leaves of the state, each in the memory where it was."""
        jaxpr = self.program.jaxpr
        env, new = self._shared(others, leaves)
        inputs, outputs = jaxpr.invars[len(others) :], jaxpr.outvars
        numbers = {key: [n for n, own_key in enumerate(self.keys) if own_key == key] for key in self.own}
        homes = [{n: leaves[n] for n in own if not is_on_device(leaves[n])} for own in numbers.values()]
        last: dict[int, Any] = {}
        for (key, own), copies in zip(numbers.items(), stream.fetched(homes), strict=True):
            arrays = {n: copies.get(n, leaves[n]) for n in own}
            # XLA drops unused results of a fence, so the results of the previous key continue from this fence. The
            # fence prevents the temporary arrays of two keys from existing at the same time.
            arrays, last = fence((arrays, last))
            new.update(last)
            inner: Env = {**env, **{inputs[n]: array for n, array in arrays.items()}}
            evaluate(jaxpr, self.own[key], inner, [outputs[n] for n in own])
            # Fence all results: one element of a sent array then shows that the whole key is done.
            results = fence(dict(zip(own, read(inner, [outputs[n] for n in own]), strict=True)))
            new.update(stream.sent({n: results[n] for n in copies}))
            last = {n: array for n, array in results.items() if n not in copies}
        return [{**new, **last}[n] for n in range(len(leaves))]

    def run_on_host(self, others: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """The new leaves of the state; the host computes the leaves of keys in its own memory."""
        env, new = self._shared(others, leaves)
        outputs = self.program.jaxpr.outvars
        for key, equations in self.own.items():
            own = [n for n, equation in enumerate(self.keys) if equation == key]
            wanted = [outputs[n] for n in own]
            made = {v for equation in equations for v in equation.outvars}
            used = operands([*wanted, *(v for equation in equations for v in equation.invars)])
            taken = list(dict.fromkeys(v for v in used if v not in made))

            def compute(values: Sequence[Any], part: Any = (equations, taken, wanted)) -> Values:
                equations, taken, wanted = part
                inner = dict(zip(taken, values, strict=True))
                evaluate(self.program.jaxpr, equations, inner, wanted)
                return read(inner, wanted)

            new.update(zip(own, compute_on_host(compute, read(env, taken)), strict=True))
        return [new[n] for n in range(len(leaves))]

    def are_local(self) -> bool:
        """Whether each device's part of a key can be updated separately."""
        return all(is_local(equation) for equations in self.own.values() for equation in equations)

    def _shared(self, others: Sequence[Any], leaves: Sequence[Any]) -> tuple[Env, dict[int, Any]]:
        """The inputs of all keys (inputs and results of the shared part), and the new leaves that belong to no key."""
        jaxpr = self.program.jaxpr
        env = variables(self.program, [*on_device(others), *leaves])
        unowned = [number for number, key in enumerate(self.keys) if key is None]
        wanted = [jaxpr.outvars[n] for n in unowned]
        # The variables of the shared part that keys use.
        equations = [equation for own in self.own.values() for equation in own]
        taken = [v for equation in equations for v in operands(equation.invars)]
        evaluate(jaxpr, self.shared, env, [*wanted, *taken])
        # The host uses gradients from either memory.
        env.update(zip(jaxpr.invars, others, strict=False))
        return env, dict(zip(unowned, read(env, wanted), strict=True))


# By the number of an array.
Arrays = dict[int, jax.Array]


class Stream:
    """The transfers of one update, key after key. ``specs``: how each array is cut over ``mesh``."""

    def __init__(self, mesh: Mesh, specs: Sequence[PartitionSpec]) -> None:
        self._mesh, self._specs = mesh, specs
        # One element of each array of the last transfer to the host.
        self._landed: Arrays = {}

    def fetched(self, homes: Sequence[Arrays]) -> Iterator[Arrays]:
        """For each key in order, device copies of its arrays in host memory (perhaps none).

        The caller passes their results to ``sent`` before it asks for the next key.
        """
        travelling = [arrays for arrays in homes if arrays]
        ahead = [on_device(arrays) for arrays in travelling[:1]]
        turn = 0
        for arrays in homes:
            if not arrays:
                yield {}
                continue
            (present,) = ahead
            turn += 1
            ahead = [self._fetch(following) for following in travelling[turn : turn + 1]]
            yield self._by_shard(_after, present, self._landed) if self._landed else present

    def sent(self, arrays: Arrays) -> Arrays:
        """Copies of these results in host memory."""
        if not arrays:
            return {}
        lying = {n: NamedSharding(self._mesh, self._specs[n]) for n in arrays}
        # ``_by_shard`` assumes these shardings.
        on_host = in_host(lax.with_sharding_constraint(arrays, lying))
        self._landed = self._by_shard(_elements, on_host)
        return on_host

    def _fetch(self, arrays: Arrays) -> Arrays:
        if not self._landed:
            return on_device(arrays)
        return self._by_shard(_parts_after, arrays, self._landed)

    def _by_shard(self, function: Any, *operands: Arrays) -> Arrays:
        """``function`` on each device's shards; a result is cut like the array with the same number."""
        specs = tuple({n: self._specs[n] for n in arrays} for arrays in operands)
        run: Any = jax.shard_map(
            # Each device slices its own shard; XLA would gather a whole array before slicing it.
            function,
            mesh=self._mesh,
            in_specs=specs,
            out_specs=specs[0],
            check_vma=False,
        )
        results: Arrays = run(*operands)
        return results


def _elements(arrays: Arrays) -> Arrays:
    """The first element of each array; it has arrived when the whole array has."""
    return on_device({n: lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for n, x in arrays.items()})


def _after(arrays: Arrays, landed: Arrays) -> Arrays:
    there = _are_there(landed)
    return {n: jnp.where(there, x, jnp.zeros_like(x)) for n, x in arrays.items()}


def _parts_after(arrays: Arrays, landed: Arrays) -> Arrays:
    """The same arrays, on the device."""
    return dict(zip(arrays, fetch_after(list(arrays.values()), _are_there(landed)), strict=True))


def _are_there(landed: Mapping[int, jax.Array]) -> jax.Array:
    """True, as soon as all elements have arrived."""
    there = jnp.array(True)
    for element in landed.values():
        number = element.reshape(()).astype(jnp.float32)
        # Each number satisfies one of the two, and NaN the second. So this is always True, but XLA cannot know that.
        there &= (number >= 0) | ~(number >= 1)
    return there


# In earlier versions, a host program cannot choose the memory of its results.
_SINCE = (0, 10, 1)
# Reductions of sharded arrays, outside shard_map.
_REDUCTIONS = frozenset([
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "reduce", "argmax", "argmin", "sort", "top_k", "dot_general",
    "conv_general_dilated", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
])  # fmt: skip
_COLLECTIVES = frozenset([
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "reduce_scatter", "all_to_all", "ppermute", "pbroadcast",
])  # fmt: skip


def is_local(equation: Any) -> bool:
    """Whether each device's part of the results depends only on its own parts of the operands."""
    names = _COLLECTIVES if equation.primitive.name == "shard_map" else _COLLECTIVES | _REDUCTIONS
    return not runs_any(equation, names)


def compute_on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> Sequence[Any]:
    """Inside a program: run ``function(values)`` in host memory; values on the device are sent there.

    Raises ``ValueError`` for a version of JAX that does not support this.
    """
    if jax.__version_info__ < _SINCE:
        since = ".".join(map(str, _SINCE))
        raise ValueError(
            f"update on the host: expected jax {since} or later, got {jax.__version__}: update jax"
        )
    # In JAX 0.12 this function has the name that earlier versions use for a context manager.
    placed: Any = compute_on.compute_on2 if hasattr(compute_on, "compute_on2") else compute_on.compute_on

    def run(values: Sequence[Any]) -> Sequence[Any]:
        # JAX assumes that a program's own values are on the device, and refuses to mix memories.
        return function(on_device(values))

    sent = [in_host(x) if is_on_device(x) else x for x in values]
    on_host = placed(run, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    results: Sequence[Any] = on_host(sent)
    return results
