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


def spoiled(plan, values, positions):
    """The weights with NaN in ``positions``, and an infinity in each parameter's first."""
    whole = {path: np.array(value) for path, value in values.items()}
    for path, indices in positions.items():
        for index in indices:
            whole[path][index] = np.inf if index is indices[0] else np.nan

    def read(path, offsets, sizes):
        return whole[path][tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]

    return {key: plan.build_buffer(key, read) for key in plan.arrays}


def holders(plan, array, path, index):
    """The devices that hold the element, from the shards themselves."""
    devices = []
    for shard in array.addressable_shards:
        for piece in plan.stored(plan.parameters[path].key).pieces(shard.index, np.asarray(shard.data)):
            if piece.path != path:
                continue
            box = zip(index, piece.offsets, piece.sizes, strict=True)
            if all(start <= i < start + size for i, start, size in box):
                devices.append(str(shard.device))
    return devices


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
    positions = STACKED if stacked else PLACES
    bad = spoiled(plan, unshard(plan, weights), positions)
    reports = {report.name: report for report in find_nonfinite(plan, bad)}
    assert list(reports) == [path for path in plan.parameters if path in positions]
    for path, indices in positions.items():
        report = reports[path]
        assert (report.kind, report.nan, report.inf) == ("", len(indices) - 1, 1)
        rows = {index[:-1] if len(index) > 1 else index for index in indices}
        assert report.rows == tuple(sorted(rows))
        array = bad[plan.parameters[path].key]
        assert set(report.devices) == {d for i in indices for d in holders(plan, array, path, i)}
        assert path in str(report)


def test_a_state_says_weights_moments_and_variables_apart():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    optimizer = main_weight_adamw(1e-3)
    state = init_state(plan, weights, optimizer)
    bad = spoiled(plan, unshard(plan, weights), {"layers/1/mlp/b": [(3,), (1,), (2,)]})
    moments = dataclasses.replace(state.opt_state, mu=bad)
    state = dataclasses.replace(
        state, weights=bad, opt_state=moments, variables={"norm/mean": jnp.array([0.0, jnp.nan])}
    )
    reports = find_nonfinite(plan, state, max_rows=2)
    assert [(report.kind, report.name, report.nan, report.inf, report.rows) for report in reports] == [
        ("weights", "layers/1/mlp/b", 2, 1, ((1,), (2,))),
        ("opt_state/mu", "layers/1/mlp/b", 2, 1, ((1,), (2,))),
        ("variables", "norm/mean", 1, 0, ((1,),)),
    ]


def test_padding():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    assert plan.units[""].layout.padded_size > 25
    (report,) = find_nonfinite(plan, weights | {"": weights[""].at[-1].set(jnp.nan)})
    assert (report.name, report.nan, report.devices) == ("padding of ''", 1, (str(plan.mesh.devices[3]),))


def test_bfloat16_and_what_has_no_values():
    plan, weights = fully_shard(tiny.decoder(), data_parallel_mesh(4))
    key = next(iter(weights))
    half = {key: weights[key].astype(jnp.bfloat16).at[0].set(jnp.inf), "key": jax.random.key(0), "n": 1}
    (report,) = find_nonfinite(plan, half)
    assert (report.nan, report.inf, report.devices) == (0, 1, (str(plan.mesh.devices[0]),))
    with pytest.raises(
        ValueError, match=r"expected an array with values, got a traced one: .* watch_nonfinite"
    ):
        jax.jit(lambda w: find_nonfinite(plan, w))(weights)
    for array in weights.values():
        array.delete()
    with pytest.raises(ValueError, match="expected values, got an array that was donated"):
        find_nonfinite(plan, weights)
