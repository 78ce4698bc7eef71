"""What a program's text says: products, memory traffic, transfers, by sums that a person would do."""

from __future__ import annotations

import math

import pytest

from bridge.compiling.timing.program import Done, Loop, Program, Start, Work, read_program
from bridge.core.hlo.collectives import COPY, Transfer
from tests.planning.programs import (
    FACTORS,
    GATHER_BYTES,
    GATHER_DONE,
    GATHER_START,
    PRODUCT,
    PRODUCT_BYTES,
    PRODUCT_FLOPS,
    SHARD,
    computation,
    program,
    work,
)


def test_a_fusion_has_the_products_inside_and_the_traffic_outside() -> None:
    inner = computation(
        "inner",
        "%u = bf16[512,256]{1,0} parameter(0)",
        "%v = bf16[256,128]{1,0} parameter(1)",
        "%n = bf16[512,256]{1,0} negate(%u)",
        "ROOT %d = bf16[512,128]{1,0} dot(%n, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    step = work(
        *FACTORS, "%f = bf16[512,128]{1,0} fusion(%a, %b), kind=kCustom, calls=%inner", computations=inner
    )
    assert step == Work("f", {"bf16": PRODUCT_FLOPS}, PRODUCT_BYTES)


def test_a_fusion_reads_the_layer_of_a_stack_that_it_uses_and_writes_it_in_place() -> None:
    inner = computation(
        "inner",
        "%stack = f32[32,100]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%zero = s32[] constant(0)",
        "%layer = f32[1,100]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,100}",
        "%negative = f32[1,100]{1,0} negate(%layer)",
        "ROOT %d = f32[32,100]{1,0} dynamic-update-slice(%stack, %negative, %i, %zero)",
    )
    step = work(
        "%stack = f32[32,100]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%f = f32[32,100]{1,0} fusion(%stack, %i), kind=kLoop, calls=%inner",
        computations=inner,
    )
    assert step.bytes == 2 * 400 + 4


WHOLE, PART = "f32[100,10]{1,0}", "f32[5,10]{1,0}"
OPERANDS = (f"%x = {WHOLE} parameter(0)", f"%u = {PART} parameter(1)", "%i = s32[] parameter(2)")
SLICE = f"= {PART} slice(%x), slice={{[0:5], [0:10]}}"
UPDATE = f"%d = {WHOLE} dynamic-update-slice(%x, %u, %i, %i)"


@pytest.mark.parametrize(
    ("line", "elements"),
    [
        (f"%s {SLICE}", 50 + 50),
        (f"%s = {PART} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={{5,10}}", 50 + 50),
        ("%g = f32[3,10]{1,0} gather(%x, %i), slice_sizes={1,10}", 30 + 30),
        (UPDATE, 50 + 50),
        ("%c = f32[105,10]{1,0} concatenate(%x, %u), dimensions={0}", 1000 + 50 + 1050),
        (f'%k = ({PART}, u8[99]{{0}}) custom-call(%x, %i), custom_call_target="__cuother"', 1000 + 1 + 50),
        (f'%k = {PART} custom-call(%x, %i), custom_call_target="__cuother"', 1000 + 1 + 50),
        (f'%k = ({PART}, f32[9]{{0}}) custom-call(%u), custom_call_target="other"', 50 + 50 + 9),
    ],
)
def test_an_operation_reads_and_writes_the_parts_that_it_uses(line: str, elements: int) -> None:
    assert work(*OPERANDS, line).bytes == 4 * elements


@pytest.mark.parametrize(
    ("result", "lines", "elements"),
    [
        # A parameter that is passed on is neither read nor written.
        (
            f"({WHOLE}, {PART})",
            [f"%n = {WHOLE} negate(%x)", f"ROOT %t = ({WHOLE}, {PART}) tuple(%n, %u)"],
            2000,
        ),
        (f"({PART}, {PART})", [f"%n {SLICE}", f"ROOT %t = ({PART}, {PART}) tuple(%n, %n)"], 50 + 100),
        # An update in place, also behind a bitcast.
        (WHOLE, [UPDATE, f"ROOT %n = {WHOLE} bitcast(%d)"], 50 + 50 + 1),
        (
            f"({WHOLE}, {PART})",
            [UPDATE, f"%s {SLICE}", f"ROOT %t = ({WHOLE}, {PART}) tuple(%d, %s)"],
            100 + 1 + 100,
        ),
        # An update that is calculated with: the whole is read.
        (WHOLE, [UPDATE, f"ROOT %n = {WHOLE} negate(%d)"], 1000 + 50 + 1 + 1000),
        # What is no result of one size needs all of its operands, and no more than all.
        (
            "f32[10]{0}",
            ["%z = f32[] constant(0)", "ROOT %r = f32[10]{0} reduce(%x, %z), dimensions={0}"],
            1010,
        ),
        ("f32[9,5,10]{2,1,0}", ["ROOT %r = f32[9,5,10]{2,1,0} broadcast(%u), dimensions={1,2}"], 50 + 450),
        (
            WHOLE,
            [f"%s {SLICE}", f"%n = {WHOLE} negate(%x)", f"ROOT %r = {WHOLE} pad(%s, %n), padding=0_95x0_0"],
            1000 + 1000,
        ),
        ("f32[1000]{0}", [f"%n = {WHOLE} negate(%x)", "ROOT %r = f32[1000]{0} reshape(%n)"], 1000 + 1000),
        # A gather by indices that are an operand reads them whole.
        (PART, [f"ROOT %g = {PART} gather(%u, %x), slice_sizes={{1,10}}"], 50 + 1000 + 50),
    ],
)
def test_a_fusion_reads_and_writes_the_parts_that_it_uses(
    result: str, lines: list[str], elements: int
) -> None:
    inner = computation("inner", *OPERANDS, *lines)
    step = work(*OPERANDS, f"%f = {result} fusion(%x, %u, %i), kind=kLoop, calls=%inner", computations=inner)
    assert step.bytes == 4 * elements


def test_a_fusion_without_its_computation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^fusion f: expected its computation in the text, got none$"):
        work(*OPERANDS, f"%f = {WHOLE} fusion(%x), kind=kLoop, calls=%inner")


def test_transfers_and_copies_of_loops_count_in_each_turn() -> None:
    copy, gather = Start("c", Transfer(COPY, 7)), Start("g", Transfer("all_gather", 100))
    parsed = Program(
        (Loop(3, (copy, Done("c"), Loop(2, (gather, Done("g"))))), Work("w", {"bf16": 5}, 11), copy)
    )
    assert parsed.transfers == [(copy.transfer, 3), (gather.transfer, 6), (copy.transfer, 1)]
    assert (parsed.bytes, parsed.flops) == (4 * 7 + 11, {"bf16": 5})


def test_a_part_of_what_is_elementwise_needs_a_part_of_the_operands() -> None:
    inner = computation(
        "inner",
        "%x = f32[100,10]{1,0} parameter(0)",
        "%y = bf16[100,10]{1,0} parameter(1)",
        "%wide = f32[100,10]{1,0} convert(%y)",
        "%sum = f32[100,10]{1,0} add(%x, %wide)",
        "ROOT %part = f32[5,10]{1,0} slice(%sum), slice={[0:5], [0:10]}",
    )
    step = work(
        "%x = f32[100,10]{1,0} parameter(0)",
        "%y = bf16[100,10]{1,0} parameter(1)",
        "%f = f32[5,10]{1,0} fusion(%x, %y), kind=kLoop, calls=%inner",
        computations=inner,
    )
    assert step.bytes == 50 * (4 + 2 + 4)


def test_what_lies_in_vmem_and_what_moves_nothing_is_free() -> None:
    step = work(
        "%a = f32[100]{0:T(128)} parameter(0)",
        "%t = (f32[100]{0:T(128)}, f32[100]{0:T(128)}) tuple(%a, %a)",
        "%g = f32[100]{0:T(128)} get-tuple-element(%t), index=1",
        '%k = f32[100]{0:T(128)} custom-call(%g), custom_call_target="ConcatBitcast"',
        "%b = f32[10,10]{1,0:T(8,128)} bitcast(%k)",
        "%n = f32[10,10]{1,0:T(8,128)S(1)} negate(%b)",
    )
    assert step == Work("n", {}, 400)


def test_a_copy_to_vmem_is_under_way_beside_other_work() -> None:
    steps = read_program(
        program(
            "%a = f32[100]{0:T(128)} parameter(0)",
            "%cs = (f32[100]{0:T(128)S(1)}, f32[100]{0:T(128)}, u32[]{:S(2)}) copy-start(%a)",
            "%cd = f32[100]{0:T(128)S(1)} copy-done(%cs)",
        )
    ).steps
    assert steps == (Start("cs", Transfer(COPY, 400)), Done("cs"))


def test_a_loop_has_the_trips_that_the_compiler_tells() -> None:
    body = computation(
        "body",
        "%c = (bf16[512,256]{1,0}, bf16[256,128]{1,0}) parameter(0)",
        "%a = bf16[512,256]{1,0} get-tuple-element(%c), index=0",
        "%b = bf16[256,128]{1,0} get-tuple-element(%c), index=1",
        PRODUCT,
        "ROOT %r = (bf16[512,256]{1,0}, bf16[256,128]{1,0}) tuple(%a, %b)",
    )
    loop = "%w = (bf16[512,256]{1,0}, bf16[256,128]{1,0}) while(%t), condition=%cond, body=%body"
    start = "%t = (bf16[512,256]{1,0}, bf16[256,128]{1,0}) tuple(%a, %b)"
    told = program(
        *FACTORS, start, loop + ', backend_config={"known_trip_count":{"n":"31"}}', computations=body
    )
    parsed = read_program(told)
    assert parsed.steps == (Loop(31, (Work("p", {"bf16": PRODUCT_FLOPS}, PRODUCT_BYTES),)),)
    assert parsed.flops == {"bf16": 31 * PRODUCT_FLOPS}
    assert parsed.bytes == 31 * PRODUCT_BYTES

    condition = computation(
        "cond",
        "%c = (s32[], f32[1]) parameter(0)",
        "%i = s32[]{:T(128)} get-tuple-element(%c), index=0",
        "%n = s32[]{:T(128)} constant(7)",
        "ROOT %less = pred[] compare(%i, %n), direction=LT",
    )
    (counted,) = read_program(program(*FACTORS, start, loop, computations=body + condition)).steps
    assert isinstance(counted, Loop)
    assert counted.times == 7
    with pytest.raises(ValueError, match="loops of known length, got w"):
        read_program(program(*FACTORS, start, loop, computations=body))


def test_a_transfer_and_the_work_beside_it() -> None:
    gather = Transfer("all_gather", GATHER_BYTES, (tuple(range(8)),))
    steps = read_program(program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE)).steps
    assert steps == (Start("gs", gather), Work("p", {"bf16": PRODUCT_FLOPS}, PRODUCT_BYTES), Done("gs"))


@pytest.mark.parametrize(
    ("written", "collective", "size", "group"),
    [
        ("f32[80]{0} all-gather(%s), replica_groups={{0,2},{1,3}}", "all_gather", 320, (0, 2)),
        ("f32[80]{0} all-reduce(%s), replica_groups=[2,4]<=[8]", "psum", 320, (0, 1, 2, 3)),
        ("f32[80]{0} all-reduce(%s), replica_groups=[4,2]<=[2,4]T(1,0)", "psum", 320, (0, 4)),
        ("f32[80]{0} all-reduce(%s), replica_groups={}", "psum", 320, tuple(range(8))),
        ("f32[10]{0} reduce-scatter(%s), replica_groups={{0,1,2,3}}", "reduce_scatter", 160, (0, 1, 2, 3)),
        ("f32[80]{0} all-to-all(%s), replica_groups=mesh['x'=2,'y'=4] {'x'}", "all_to_all", 320, (0, 4)),
        (
            "f32[80]{0} all-to-all(%s), replica_groups=mesh['x'=2,'y'=4] {'y'}",
            "all_to_all",
            320,
            (0, 1, 2, 3),
        ),
    ],
)
def test_collectives_that_nothing_runs_beside(
    written: str, collective: str, size: int, group: tuple[int, ...]
) -> None:
    steps = read_program(program("%s = f32[80]{0} parameter(0)", f"%c = {written}")).steps
    assert steps == (Start("c", Transfer(collective, size, (group,))), Done("c"))


def test_a_permutation_has_its_pairs() -> None:
    line = "%c = f32[80]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0}}"
    start = read_program(program("%s = f32[80]{0} parameter(0)", line)).steps[0]
    assert start == Start("c", Transfer("ppermute", 320, ((0, 1), (1, 0))))


def test_the_fusions_of_a_tpu_are_one_transfer() -> None:
    gather = "%g = bf16[8192]{0} all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}"
    begun = "(bf16[2048]{0}, bf16[8192]{0}, u32[]{:S(2)})"
    first, second = (
        computation(name, "%x = bf16[2048]{0} parameter(0)", gather, mark)
        for name, mark in (
            ("begin", f'ROOT %m = {begun} custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
            ("end", 'ROOT %m = bf16[8192]{0} custom-call(%x, %g), custom_call_target="AsyncCollectiveDone"'),
        )
    )
    beside = computation(
        "beside",
        "%x = bf16[2048]{0} parameter(0)",
        "%u = bf16[512,256]{1,0} parameter(1)",
        "%v = bf16[256,128]{1,0} parameter(2)",
        gather,
        "%d = bf16[512,128]{1,0} dot(%u, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT %r = (bf16[512,128]{1,0}, bf16[8192]{0}) tuple(%d, %g)",
    )
    steps = read_program(
        program(
            *FACTORS,
            "%s = bf16[2048]{0} parameter(2)",
            f"%f1 = {begun} fusion(%s), kind=kCustom, calls=%begin",
            "%f2 = (bf16[512,128]{1,0}, bf16[8192]{0}) fusion(%s, %a, %b), kind=kCustom, calls=%beside",
            "%f3 = bf16[8192]{0} fusion(%s), kind=kCustom, calls=%end",
            gather.replace("%x", "%s"),
            computations=first + beside + second,
        )
    ).steps
    start, product, done, *again = steps
    assert isinstance(start, Start)
    assert start.transfer == Transfer("all_gather", 2 * 8192, ((0, 1, 2, 3),))
    assert product == Work("f2", {"bf16": PRODUCT_FLOPS}, PRODUCT_BYTES)
    assert done == Done(start.key)
    assert again == [Start("g", start.transfer), Done("g")]


def test_a_fused_reduction_that_keeps_a_shard_is_a_reduce_scatter() -> None:
    inner = computation(
        "inner",
        "%x = f32[80]{0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%all = f32[80]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}",
        "ROOT %own = f32[10]{0} dynamic-slice(%all, %i), dynamic_slice_sizes={10}",
    )
    start = read_program(
        program(
            "%x = f32[80]{0} parameter(0)",
            "%i = s32[] parameter(1)",
            "%f = f32[10]{0} fusion(%x, %i), kind=kCustom, calls=%inner",
            computations=inner,
        )
    ).steps[0]
    assert start == Start("f", Transfer("reduce_scatter", 320, (tuple(range(8)),)))


def test_of_a_conditional_the_longer_branch_counts() -> None:
    short = computation("short", "%c = f32[10]{0} parameter(0)", "ROOT %n = f32[10]{0} negate(%c)")
    long = computation("long", "%c = f32[10,10]{1,0} parameter(0)", "ROOT %n = f32[10,10]{1,0} negate(%c)")
    line = "%r = f32[10]{0} conditional(%i, %a, %a), branch_computations={%short, %long}"
    parsed = read_program(program(line, computations=short + long))
    assert parsed.bytes == 2 * 4 * math.prod((10, 10))
    assert read_program(program("%r = f32[10]{0} conditional(%i, %a, %a)")).steps == ()


def test_what_is_no_scheduled_program_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a scheduled program.*got 'module @jit_f'"):
        read_program("module @jit_f\n")
    with pytest.raises(ValueError, match="ENTRY"):
        read_program("HloModule x, is_scheduled=true\n")
