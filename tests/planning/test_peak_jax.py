"""The moments of a step in JAX, term by term, as XLA's buffer assignments have them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bridge.planning import Workload, make_plan, parse_policy
from bridge.planning.cost import peak_jax
from bridge.planning.cost.peak_steps import StepUnit, steps_of
from bridge.planning.models.activations import Segment, SegmentBytes
from bridge.planning.models.model import Model, Parameter

# Bytes of a layer's and of the root's weights, which divide evenly by 4 devices.
LAYER, ROOT = 4 * 512, 4 * 1024


@dataclass(frozen=True)
class Fixed:
    """A segment of given bytes."""

    path: str
    counted: SegmentBytes
    parts: tuple[Segment, ...] = field(default=())

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        return self.counted


BLOCK = SegmentBytes(
    saved=700, input=10, forward=720, backward=900, again=800, once=300, fixed=50, fixed_saved=40, largest=100
)
HEAD = SegmentBytes(saved=60, input=10, forward=70, backward=90, again=80, largest=30)


def model_of(layers: int) -> Model:
    paths = [f"layers.{k}" for k in range(layers)]
    return Model.of(
        "small",
        [
            Parameter("embed.weight", (64, 8)),
            *(Parameter(f"{path}.kernel", (64, 8)) for path in paths),
            Parameter("lm_head.kernel", (8, 64)),
        ],
        [Fixed("embed", SegmentBytes()), *(Fixed(path, BLOCK) for path in paths), Fixed("", HEAD)],
    )


def moments(
    strategy: str,
    *,
    layers: int = 3,
    microbatches: int = 1,
    recompute: bool = False,
    stacked: bool = False,
    prefetch: int = 0,
) -> dict[str, dict[str, int]]:
    """Terms by the moment's name."""
    unit = f'strategy = "{strategy}"\nalign = 1\n'
    policy = parse_policy(
        f'[[unit]]\nmatch = "layers.*"\n{unit}recompute = {str(recompute).lower()}\n[[unit]]\nmatch = ""\n{unit}',
        "x",
    )
    model = replace(model_of(layers), stacks=("layers",) if stacked else ())
    plan = make_plan(model, policy, 4, "jax", Workload(microbatches=microbatches))
    units = [
        StepUnit(path, unit.groups, unit.kind.recompute, "layers" if stacked and path else None)
        for unit in sorted(plan.units, key=lambda unit: unit.paths == ("",))
        for path in unit.paths
    ]
    whole = layers * LAYER + ROOT if strategy != "optim_grads_params" else 0
    return dict(peak_jax.moments(list(steps_of(model, units, 1, 1)), units, microbatches, prefetch, whole))


def test_outputs_are_there_from_the_start() -> None:
    by_moment = moments("optim_grads_params")
    assert {by_moment[name]["gradients"] for name in by_moment} == {(3 * LAYER + ROOT) // 4}


def test_a_segments_own_gradients_take_the_place_of_what_it_has_saved() -> None:
    by_moment = moments("optim_grads_params")
    head = ROOT // 2
    assert by_moment["backward of layers.2"]["gradient_buffers"] == head
    # By parameter and in one array, beside the gradient of the output projection.
    assert by_moment["reduction of layers.2"]["gradient_buffers"] == head + 2 * LAYER
    assert by_moment["reduction of layers.2"]["gathered_weights"] == 0
    assert by_moment["reduction of layers.2"]["segment"] == BLOCK.input


def test_backward_gathers_what_it_has_yet_to_read() -> None:
    by_moment = moments("optim_grads_params")
    assert by_moment["forward of layers.1"]["gathered_weights"] == LAYER + ROOT
    assert by_moment["backward of layers.1"]["gathered_weights"] == LAYER
    assert by_moment["backward of embed"]["gathered_weights"] == 0
    ahead = moments("optim_grads_params", prefetch=1)
    assert ahead["backward of layers.1"]["gathered_weights"] == 2 * LAYER
    assert ahead["reduction of layers.1"]["gathered_weights"] == LAYER
    assert ahead["backward of layers.1"]["gradient_buffers"] == ROOT // 2 + LAYER


def test_whole_weights_end_with_the_last_backward_that_reads_them() -> None:
    by_moment = moments("optim")
    whole = 3 * LAYER + ROOT
    assert by_moment["backward of the root"]["compute_weights"] == whole
    # The embedding's backward reads no weights.
    assert by_moment["backward of layers.2"]["compute_weights"] == whole - ROOT
    assert by_moment["reduction of layers.2"]["compute_weights"] == whole - ROOT - LAYER
    # A loop over microbatches holds them for the next one.
    assert moments("optim", microbatches=2)["backward of layers.0"]["compute_weights"] == whole


def test_sums_of_microbatches_lie_beside_the_outputs_where_they_are_reduced_late() -> None:
    whole = 3 * LAYER + ROOT
    late, early = (moments(strategy, microbatches=2) for strategy in ("optim", "optim_grads"))
    assert late["forward of embed"]["gradients"] == whole // 4 + whole
    assert late["sum"]["gradients"] == whole // 4 + 2 * whole + ROOT
    # Sums that have the outputs' shape are the outputs.
    assert early["forward of embed"]["gradients"] == whole // 4
    assert early["sum"]["gradients"] == whole // 4 + whole // 4 + ROOT // 4
    assert "sum" not in moments("optim")


def test_operands_of_the_output_projections_gradient_wait() -> None:
    for strategy, times in (("optim_grads_params", 1), ("optim", 2)):
        by_moment = moments(strategy)
        assert by_moment["backward of layers.2"]["activations"] == 3 * BLOCK.saved - BLOCK.saved + times * 30
        assert moments(strategy, stacked=True)["backward of layers.2"]["activations"] == 3 * BLOCK.saved
    assert moments("optim")["backward of the root"]["segment"] == HEAD.backward + HEAD.largest
    assert moments("optim_grads_params")["backward of the root"]["segment"] == HEAD.backward


def test_loops_hold_constants_slices_and_what_is_stacked() -> None:
    sharded, whole = (moments(strategy, stacked=True) for strategy in ("optim_grads_params", "optim"))
    assert sharded["forward of layers.0"]["segment"] == BLOCK.forward + BLOCK.fixed
    assert sharded["backward of layers.0"]["activations"] == 3 * BLOCK.saved
    assert sharded["backward of layers.0"]["segment"] == BLOCK.backward
    assert whole["backward of layers.0"]["segment"] == BLOCK.backward + BLOCK.fixed_saved
    assert moments("optim_grads_params")["forward of layers.0"]["segment"] == BLOCK.forward
    # The stack of gradients is made before the loop, and a layer's array fits into no output: 3 / 4 of its size.
    outputs = (3 * LAYER + ROOT) // 4
    assert whole["backward of the root"]["gradients"] == outputs + 3 * LAYER


def test_an_output_that_is_written_late_lends_its_memory_to_a_layers_array() -> None:
    outputs = (5 * LAYER + ROOT) // 4
    # Five quarters of a layer, of which one layer's array takes four.
    assert moments("optim", layers=5, stacked=True)["forward of embed"]["gradients"] == outputs - LAYER
    assert moments("optim", layers=5)["forward of embed"]["gradients"] == outputs
    assert moments("optim_grads", layers=5, stacked=True)["forward of embed"]["gradients"] == outputs


def test_a_recomputed_layer_holds_three_arrays_of_a_chain_and_its_input() -> None:
    by_moment = moments("optim_grads_params", recompute=True)
    assert by_moment["forward of layers.1"]["segment"] == BLOCK.once
    assert by_moment["backward of layers.1"]["segment"] == BLOCK.again
    assert by_moment["backward of layers.1"]["activations"] == BLOCK.input + HEAD.largest


def test_a_segment_of_residuals_holds_its_input_twice_in_backward_only() -> None:
    # Backward adds a cotangent of the input's size, one of the output's and one of the largest intermediate.
    counted = SegmentBytes.of_residuals(700, 10, 100, fixed=50, fixed_saved=40)
    assert (counted.saved, counted.input, counted.forward, counted.backward) == (700, 10, 710, 820)
    assert (counted.once, counted.again, counted.fixed, counted.fixed_saved) == (320, 800, 50, 40)
