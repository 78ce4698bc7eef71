"""The reader of scheduled programs, on short texts in the words of XLA's GPU and TPU compilers."""

from __future__ import annotations

import pytest

from jax_impl import count_compiled_collectives
from jax_impl.diagnostics.collectives import Collective
from jax_impl.diagnostics.scheduled import Array, Scheduled, read_collectives
from tests.support.compilers.setting import overlap_share

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"
PRODUCT = '%p = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"'


def program(*lines: str, before: str = "") -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule test\n\n{before}\nENTRY %main (a: f32[8,8], x: f32[16]) -> f32[] {{\n{body}}}\n"


def computation(name: str, *lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"%{name} (x: f32[16]) -> f32[64] {{\n{body}}}\n\n"


def gather(*between: str) -> tuple[str, ...]:
    return (
        f"%s = (f32[16]{{0}}, f32[64]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
        *between,
        "%d = f32[64]{0} all-gather-done(%s)",
    )


@pytest.mark.parametrize(
    ("lines", "before", "overlaps"),
    [
        pytest.param(gather(), "", False, id="nothing"),
        pytest.param(gather("%y = f32[16]{0} add(%x, %x)"), "", False, id="no product"),
        pytest.param(gather(PRODUCT), "", True, id="cuBLAS"),
        pytest.param((*gather(), PRODUCT), "", False, id="product after the end"),
        pytest.param((PRODUCT, *gather()), "", False, id="product before the start"),
        pytest.param(gather("%p = f32[8,8]{1,0} dot(%a, %a)"), "", True, id="dot"),
        pytest.param(
            gather("%p = f32[64]{0} fusion(%a), kind=kCustom, calls=%gemm"),
            computation("gemm", "ROOT %c = f32[64]{0} dot(%x, %x)"),
            True,
            id="Triton",
        ),
        pytest.param(
            gather("%p = f32[64]{0} fusion(%a), kind=kLoop, calls=%sum"),
            computation("sum", "ROOT %c = f32[64]{0} add(%x, %x)"),
            False,
            id="another fusion",
        ),
        pytest.param(
            gather("%p = f32[64]{0} while(%a), condition=%c, body=%turn"),
            computation("turn", "ROOT %c = f32[64]{0} dot(%x, %x)"),
            True,
            id="loop with a product",
        ),
        pytest.param(
            (f"%g = f32[64]{{0}} all-gather(%x), {GROUPS}, dimensions={{0}}", PRODUCT), "", False, id="sync"
        ),
    ],
)
def test_a_product_between_start_and_end_overlaps(lines: tuple[str, ...], before: str, overlaps: bool):
    (collective,) = read_collectives(program(*lines, before=before))
    assert (collective.kind, collective.arrays, collective.times) == ("all_gather", (Array("f32", 64),), 1)
    assert collective.overlaps == overlaps


@pytest.mark.parametrize(
    ("line", "operation", "arrays"),
    [
        (
            "%s = ((f32[64]{0}, bf16[8,4]{1,0}), (f32[16]{0}, bf16[2,4]{1,0})) reduce-scatter-start(%x, %y)",
            "reduce_scatter",
            (Array("f32", 64), Array("bf16", 32)),
        ),
        ("%s = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%x)", "reduce_scatter", (Array("f32", 64),)),
        ("%s = f32[16]{0} reduce-scatter(%x)", "reduce_scatter", (Array("f32", 64),)),
        (
            "%s = ((f32[16]{0}, /*index=1*/f8e4m3fn[2,8]{1,0:T(8,128)}), (f32[64]{0}, /*index=1*/f8e4m3fn[8,8]{1,0})) "
            "all-gather-start(%x, %y)",
            "all_gather",
            (Array("f32", 64), Array("f8e4m3fn", 64)),
        ),
        ("%s = f32[16]{0:T(128)S(1)} all-reduce(%x)", "psum", (Array("f32", 16),)),
        ("%s = (f32[16]{0}, f32[]) all-reduce-start(%x, %y)", "psum", (Array("f32", 16), Array("f32", 1))),
    ],
)
def test_full_arrays_are_told_one_by_one(line: str, operation: str, arrays: tuple[Array, ...]):
    (collective,) = read_collectives(program(f"{line}, {GROUPS}"))
    assert (collective.kind, collective.arrays) == (operation, arrays)
    assert collective.bytes == sum(
        array.size * {"f32": 4, "bf16": 2, "f8e4m3fn": 1}[array.dtype] for array in arrays
    )


@pytest.mark.parametrize(
    "groups", ["[2,4]<=[8]", "mesh['dp_outer'=2,'dp'=4] {'dp'}", "{{0,1,2,3},{4,5,6,7}}"]
)
def test_groups_are_read_as_every_version_writes_them(groups: str):
    (collective,) = read_collectives(
        program(f"%s = f32[16]{{0}} reduce-scatter(%x), replica_groups={groups}")
    )
    assert collective.arrays == (Array("f32", 64),)


def test_loops_are_multiplied_out():
    before = (
        computation("inner", f"ROOT %g = f32[64]{{0}} all-gather(%x), {GROUPS}")
        + computation("condition", "ROOT %c = pred[] compare(%x, %x)")
        + computation(
            "outer",
            'ROOT %w = f32[64]{0} while(%x), body=%inner, backend_config={"known_trip_count":{"n":"3"}}',
        )
    )
    loop = "%w = f32[64]{0} while(%x), condition=%condition, body=%outer"
    (collective,) = read_collectives(
        program(f'{loop}, backend_config={{"known_trip_count":{{"n":"5"}}}}', before=before)
    )
    assert (collective.times, collective.bytes) == (15, 15 * 256)
    with pytest.raises(ValueError, match="loops of known length"):
        read_collectives(program(loop, before=before))


@pytest.mark.parametrize("counter", ["s32", "u32"])
def test_a_loop_of_a_tpu_has_its_length_in_its_condition(counter: str):
    before = computation("turn", f"ROOT %g = f32[64]{{0}} all-gather(%x), {GROUPS}") + computation(
        "condition",
        f"%n = {counter}[]{{:T(128)}} constant(32), metadata={{}}",
        f"%i = {counter}[]{{:T(128)}} get-tuple-element(%x), index=0",
        "ROOT %c = pred[]{:T(512)} compare(%i, %n), direction=LT",
    )
    loop = "%w = f32[64]{0} while(%x), condition=%condition, body=%turn"
    (collective,) = read_collectives(program(loop, before=before))
    assert collective.times == 32


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%one, %none}",
        "branch_computations={%none, %one}",
        "true_computation=%none, false_computation=%one",
    ],
)
def test_a_collective_in_a_branch_is_refused(branches: str):
    before = computation("one", f"ROOT %g = f32[64]{{0}} all-gather(%x), {GROUPS}")
    before += computation("none", "ROOT %n = f32[64]{0} negate(%x)")
    line = f"%c = f32[64]{{0}} conditional(%p, %x, %x), {branches}"
    with pytest.raises(ValueError, match="expected no collective in a branch"):
        read_collectives(program(line, before=before))


def test_async_start_is_the_collective_that_it_wraps():
    before = computation("wrapped", f"ROOT %g = f32[16]{{0}} reduce-scatter(%x), {GROUPS}")
    (collective,) = read_collectives(
        program(
            "%s = ((f32[64]{0}), f32[16]{0}, s32[]) async-start(%x), calls=%wrapped",
            PRODUCT,
            "%d = f32[16]{0} async-done(%s)",
            before=before,
        )
    )
    assert collective == Scheduled("reduce_scatter", (Array("f32", 64),), 1, True, "s")


def tpu(*pieces: str) -> str:
    inside = {
        "start": 'ROOT %c = (f32[16], f32[64]) custom-call(%g), custom_call_target="AsyncCollectiveStart"',
        "step": "%c = f32[64]{0} convolution(%x, %x), dim_labels=bf_io->bf",
        "idle": "%c = f32[64]{0} add(%x, %x)",
        "done": 'ROOT %c = f32[64]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"',
    }
    before, lines = "", []
    for number, piece in enumerate(pieces):
        stage, channel = piece.split(":")
        attributes = f'channel_id={channel}, frontend_attributes={{chain_id="{channel}"}}'
        gathers = f"%g = f32[64]{{0}} all-gather(%x), {attributes}"
        before += computation(f"f{number}", gathers, inside[stage])
        lines.append(f"%fusion.{number} = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%f{number}")
    return program(*lines, before=before)


@pytest.mark.parametrize(
    ("pieces", "overlaps"),
    [
        (("start:1", "step:1", "done:1"), [True]),
        (("start:1", "idle:1", "done:1"), [False]),
        (("start:1", "done:1"), [False]),
        (("start:1", "start:2", "done:1", "step:2", "done:2"), [False, True]),
        (("start:1", "step:1", "done:1", "start:1", "done:1"), [True, False]),
    ],
)
def test_the_pieces_of_an_asynchronous_collective_on_a_tpu_are_one(
    pieces: tuple[str, ...], overlaps: list[bool]
):
    collectives = read_collectives(tpu(*pieces))
    assert [collective.overlaps for collective in collectives] == overlaps
    assert {collective.arrays for collective in collectives} == {(Array("f32", 64),)}


def test_one_fusion_may_start_a_gather_beside_a_reduction_that_is_under_way():
    scatter = f"%r = f32[16]{{0}} reduce-scatter(%x), {GROUPS.replace('=1', '=2')}"
    gathers = f"%g = f32[64]{{0}} all-gather(%x), {GROUPS.replace('=1', '=3')}"
    start, done = (
        f'custom-call(%{{}}), custom_call_target="AsyncCollective{half}"' for half in ("Start", "Done")
    )
    product = "%c = f32[64]{0} convolution(%x, %x), dim_labels=bf_io->bf"
    before = (
        computation("f0", scatter, f"ROOT %m = f32[16]{{0}} {start.format('r')}")
        + computation("f1", scatter, gathers, product, f"ROOT %m = f32[64]{{0}} {start.format('g')}")
        + computation("f2", scatter, gathers, f"ROOT %m = f32[16]{{0}} {done.format('r')}")
        + computation("f3", gathers, f"ROOT %m = f32[64]{{0}} {done.format('g')}")
    )
    lines = [
        f"%fusion.{number} = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%f{number}" for number in range(4)
    ]
    assert read_collectives(program(*lines, before=before)) == [
        Scheduled("reduce_scatter", (Array("f32", 64),), 1, True, "fusion.0"),
        Scheduled("all_gather", (Array("f32", 64),), 1, False, "fusion.1"),
    ]


def test_a_fusion_that_reduces_and_slices_is_a_reduce_scatter_and_an_psum_before_a_slice_is_none():
    fused = computation(
        "scatter",
        f"%r = f32[64]{{0}} all-reduce(%x), {GROUPS}",
        "ROOT %c = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}",
    )
    (collective,) = read_collectives(
        program("%all-reduce-scatter = f32[16]{0} fusion(%x), kind=kCustom, calls=%scatter", before=fused)
    )
    assert (collective.kind, collective.arrays) == ("reduce_scatter", (Array("f32", 64),))
    (collective,) = read_collectives(
        program(f"%r = f32[64]{{0}} all-reduce(%x), {GROUPS}", "%c = f32[16]{0} dynamic-slice(%r, %i)")
    )
    assert collective.kind == "psum"


def test_shares_are_weighted_by_bytes_and_turns():
    small = Scheduled("all_gather", (Array("f32", 100),), 1, True, "small")
    looped = Scheduled("all_gather", (Array("f32", 50), Array("bf16", 100)), 3, False, "looped")
    reduced = Scheduled("psum", (Array("f32", 1),), 1, False, "loss")
    assert overlap_share([small, looped, reduced], ["all_gather"]) == 400 / (400 + 3 * 400)
    assert overlap_share([small, reduced]) == 400 / 404
    assert overlap_share([]) == 0


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="expected the text of a compiled program"):
        read_collectives("HloModule nothing")


def test_the_counter_of_jax_impl_counts_results_of_starts_and_not_their_operands():
    text = program(
        *gather(),
        f"%r = ((f32[64]{{0}}, f32[32]{{0}}), (f32[16]{{0}}, f32[8]{{0}})) reduce-scatter-start(%x, %y), {GROUPS}",
        f"%l = f32[] all-reduce-start(%z), {GROUPS}",
    )
    assert count_compiled_collectives(text) == {
        Collective("all_gather", "float32", 64): 1,
        Collective("reduce_scatter", "float32", 64): 1,
        Collective("reduce_scatter", "float32", 32): 1,
        Collective("psum", "float32", 1): 1,
    }
