"""NaN and infinities put into known rows of known parameters, found there again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import (
    data_parallel_mesh,
    find_nonfinite,
    fully_shard,
    init_state,
    main_weight_adamw,
    unshard,
)
from tests.support.jax_impl import diagnosed, tiny

PLACES = {"embed": [(4, 2), (4, 3), (0, 1)], "layers/1/mlp/b": [(3,)], "layers/2/scale": [()]}
STACKED = {"embed": PLACES["embed"], "layers/mlp/b": [(1, 3)], "layers/scale": [(2,)]}


def spoiled(plan, values, places):
    """The weights with NaN in ``places``, and an infinity in each parameter's first."""
    whole = {path: np.array(value) for path, value in values.items()}
    for path, indices in places.items():
        for index in indices:
            whole[path][index] = np.inf if index is indices[0] else np.nan

    def read(path, offsets, sizes):
        return whole[path][tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]

    return {key: plan.build_buffer(key, read) for key in plan.arrays}


def holders(plan, array, path, index):
    """The devices that hold the element, from the shards themselves."""
    found = []
    for shard in array.addressable_shards:
        for piece in plan.stored(plan.parameters[path].key).pieces(shard.index, np.asarray(shard.data)):
            if piece.path != path:
                continue
            box = zip(index, piece.offsets, piece.sizes, strict=True)
            if all(start <= i < start + size for i, start, size in box):
                found.append(str(shard.device))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [(4, "optim_grads_params"), (3, "no_shard"), ({"a": 2, "b": 3}, "hsdp"), ({"a": 2, "b": 3}, "hfsdp")],
)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_parameter_rows_and_devices(engine, mesh, strategy, stacked):
    plan, weights = fully_shard(
        diagnosed.parameters(stacked),
        data_parallel_mesh(mesh),
        engine=engine,
        strategy=strategy,
        stacked=["layers"] if stacked else [],
    )
    assert find_nonfinite(plan, weights) == ()
    places = STACKED if stacked else PLACES
    bad = spoiled(plan, unshard(plan, weights), places)
    found = {one.name: one for one in find_nonfinite(plan, bad)}
    assert list(found) == [path for path in plan.parameters if path in places]
    for path, indices in places.items():
        one = found[path]
        assert (one.kind, one.nan, one.inf) == ("", len(indices) - 1, 1)
        rows = {index[:-1] if len(index) > 1 else index for index in indices}
        assert one.rows == tuple(sorted(rows))
        array = bad[plan.parameters[path].key]
        assert set(one.devices) == {d for i in indices for d in holders(plan, array, path, i)}
        assert path in str(one)


def test_a_state_says_weights_moments_and_variables_apart():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    optimizer = main_weight_adamw(1e-3)
    state = init_state(plan, weights, optimizer)
    bad = spoiled(plan, unshard(plan, weights), {"layers/1/mlp/b": [(3,), (1,), (2,)]})
    moments = dataclasses.replace(state.opt_state, mu=bad)
    state = dataclasses.replace(
        state, weights=bad, opt_state=moments, variables={"norm/mean": jnp.array([0.0, jnp.nan])}
    )
    found = find_nonfinite(plan, state, max_rows=2)
    assert [(one.kind, one.name, one.nan, one.inf, one.rows) for one in found] == [
        ("weights", "layers/1/mlp/b", 2, 1, ((1,), (2,))),
        ("opt_state/mu", "layers/1/mlp/b", 2, 1, ((1,), (2,))),
        ("variables", "norm/mean", 1, 0, ((1,),)),
    ]


def test_padding():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    assert plan.units[""].layout.padded_size > 25
    (one,) = find_nonfinite(plan, weights | {"": weights[""].at[-1].set(jnp.nan)})
    assert (one.name, one.nan, one.devices) == ("padding of ''", 1, (str(plan.mesh.devices[3]),))


def test_bfloat16_and_what_has_no_values():
    plan, weights = fully_shard(tiny.decoder(), data_parallel_mesh(4))
    key = next(iter(weights))
    half = {key: weights[key].astype(jnp.bfloat16).at[0].set(jnp.inf), "key": jax.random.key(0), "n": 1}
    (one,) = find_nonfinite(plan, half)
    assert (one.nan, one.inf, one.devices) == (0, 1, (str(plan.mesh.devices[0]),))
    with pytest.raises(
        ValueError, match=r"expected an array with values, got a traced one: .* watch_nonfinite"
    ):
        jax.jit(lambda w: find_nonfinite(plan, w))(weights)
    for array in weights.values():
        array.delete()
    with pytest.raises(ValueError, match="expected values, got an array that was given up"):
        find_nonfinite(plan, weights)
