"""The report of a plan against the arrays of its state."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from jax_impl import (
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    layout_report,
    make_eval_step,
)
from jax_impl.models import Decoder, DecoderConfig
from tests.jax_impl.runtime.test_strategy_matrix import EVEN
from tests.support.jax_impl import diagnosed
from tests.support.jax_impl.tiny import decoder


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("mesh", "strategy"), [(4, "optim_grads_params"), (3, "no_shard"), ({"a": 2, "b": 3}, "hsdp")]
)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_numbers_are_those_of_the_arrays(engine, stacked, mesh, strategy):
    plan, weights = fully_shard(
        Decoder(EVEN, rngs=nnx.Rngs(0), stacked=stacked),
        data_parallel_mesh(mesh),
        engine=engine,
        strategy=strategy,
        param_dtype="bfloat16",
        stacked=["layers"] if stacked else [],
    )
    report = layout_report(plan)
    assert [unit.name for unit in report.units] == list(plan.units)
    assert report.numel == sum(int(np.prod(info.shape)) for info in plan.parameters.values())
    assert report.padded_numel == sum(array.size for array in weights.values())
    assert sorted(report.whole) == sorted(plan.whole_parameters)
    assert report.nbytes == sum(array.addressable_shards[0].data.nbytes for array in weights.values())
    for unit in report.units:
        (group,) = unit.groups
        keys = {plan.parameters[path].key for path in group.parameters}
        assert group.nbytes == sum(weights[key].addressable_shards[0].data.nbytes for key in keys)
        assert sum(group.shard_sizes) * (unit.layers or 1) * 4 == group.nbytes
        assert (group.main_dtype, group.compute_dtype) == ("float32", "bfloat16")
        assert (group.gather_dtype, group.gather_bytes) == ("bfloat16", 2 * group.padded_numel)
        assert all(size % group.align == 0 for size in group.shard_sizes)
        assert unit.strategy == strategy
        assert unit.layers == (2 if stacked and unit.name else None)
    assert json.loads(json.dumps(report.as_dict()))["units"][0]["name"] == report.units[0].name
    table = str(report).splitlines()
    assert all(any(line.startswith(name or "(root)") for line in table) for name in plan.units)
    assert f"{report.nbytes:,}" in str(report)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_payload_and_scales_are_told(engine, gather):
    shapes = {"w": (3, 10, 40), "e": (3, 2, 6, 64), "b": (3, 7)}
    plan, weights = fully_shard(
        {"layers": {name: np.ones(shape, np.float32) for name, shape in shapes.items()}},
        data_parallel_mesh(2),
        units=["layers/*"],
        stacked=["layers"],
        engine=engine,
        param_dtype="bfloat16",
        gather_dtype=gather,
    )
    payload, vector = layout_report(plan).units[0].groups
    assert set(payload.parameters) == {"layers/w", "layers/e"}
    assert (payload.gather_dtype, vector.gather_dtype) == (gather, "bfloat16")
    assert vector.gather_bytes == 2 * vector.padded_numel
    assert f"float32/bfloat16/bfloat16/float32 gathered as {gather}" in str(layout_report(plan))
    if engine == "pjit":
        # A row of 40 has two blocks, and one of 64, too.
        scales = 3 * (10 * 2 + 2 * 6 * 2) if gather == "mxfp8" else 0
        assert payload.gather_bytes == payload.numel + scales
        return

    def loss(model, rows):
        def layer(carry, layer_weights):
            return call_unit(
                lambda unit, x: x * sum(w.sum() for w in unit.values()), layer_weights, carry
            ), None

        return jax.lax.scan(layer, rows, model["layers"])[0].mean()

    counts = count_collectives(make_eval_step(plan, loss), weights, np.ones((2, 1), np.float32))
    travels = sum(
        collective.size * n
        for collective, n in counts.items()
        if (collective.kind, collective.dtype) == ("all_gather", "uint8")
    )
    assert payload.gather_bytes == travels


def test_print_is_a_short_table_and_repr_a_line():
    config = DecoderConfig(
        vocab_size=23, d_model=13, n_layers=12, n_heads=2, n_kv_heads=2, head_dim=6, d_ff=19, rope_theta=100
    )
    plan, _ = fully_shard(Decoder(config, rngs=nnx.Rngs(0)), data_parallel_mesh(4))
    lines = str(plan).splitlines()
    assert lines[0].startswith("shard_map engine, 4 devices {'dp': 4}, 13 units")
    assert [line.split("  ")[0] for line in lines[2:]] == ["layers/0 .. layers/11, each", "(root)", "total"]
    assert len(str(layout_report(plan)).splitlines()) == 2 + 13 + 1
    assert repr(plan) == f"<ShardingPlan: {lines[0]}>"
    assert len(repr(plan)) < 120


def test_frozen_parameters_and_units_without_parameters():
    plan, _ = fully_shard(
        {"a": diagnosed.parameters(), "b": [{"inner": {"w": np.ones(7, np.float32)}}]},
        data_parallel_mesh(4),
        units=["a", "b/*", "b/*/*"],
        frozen=["a/embed"],
    )
    by_name = {unit.name: unit for unit in layout_report(plan).units}
    assert [group.trainable for group in by_name["a"].groups] == [True, False]
    assert by_name["a"].groups[1].parameters == ("a/embed",)
    assert by_name["b/0"].groups == ()
    assert "1 frozen" in str(plan)


def test_whole_parameters_are_named():
    with pytest.warns(RuntimeWarning, match="every device holds them whole"):
        plan, _ = fully_shard(decoder(), data_parallel_mesh(4), engine="pjit")
    last = str(plan).splitlines()[-1]
    assert sorted(layout_report(plan).whole) == sorted(plan.whole_parameters)
    assert last.startswith("whole on every device: layers/0/attention/key/kernel, ")
    assert last.endswith(f" and {len(plan.whole_parameters) - 8} more")


@pytest.mark.parametrize("align", [1, 128])
def test_the_report_tells_of_what_every_shard_is_a_multiple(align: int):
    plan, _ = fully_shard(Decoder(EVEN, rngs=nnx.Rngs(0)), data_parallel_mesh(4), align=align)
    report = layout_report(plan)
    assert {group.align for unit in report.units for group in unit.groups} == {align}
    header, *rows = str(report).splitlines()[1:]
    column = header.split().index("align") - len(header.split())
    assert {row.split()[column] for row in rows[:-1]} == {str(align)}
