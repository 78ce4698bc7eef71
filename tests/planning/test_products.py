"""Operations of the matrix products in a program's text, by sums that a person would do."""

from __future__ import annotations

import itertools

import pytest

from bridge.compiling.timing.program import Work, read_program
from tests.planning.programs import FACTORS, PRODUCT, PRODUCT_BYTES, PRODUCT_FLOPS, program, work

CUBLAS = (
    '%c = (f32[4,32,64]{2,1,0}, s8[4096]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},'
    '"precision_config":{"operand_precision":["%s","%s"]}}}'
)
BATCH = ("%x = f32[4,16,32]{2,1,0} parameter(0)", "%y = f32[4,16,64]{2,1,0} parameter(1)")


def test_a_dot() -> None:
    assert work(*FACTORS, PRODUCT) == Work("p", {"bf16": PRODUCT_FLOPS}, PRODUCT_BYTES)


@pytest.mark.parametrize(
    ("precision", "speed"), [("DEFAULT", "f32"), ("HIGH", "f32_high"), ("HIGHEST", "f32_highest")]
)
def test_a_batch_of_products_by_cublas_without_its_scratch_memory(precision: str, speed: str) -> None:
    step = work(*BATCH, CUBLAS.replace("%s", precision))
    assert step.flops == {speed: 2 * 4 * 32 * 64 * 16}
    assert step.bytes == 4 * 4 * (16 * 32 + 16 * 64 + 32 * 64)


def test_attention_by_cudnn_is_two_products_forward_and_five_backward() -> None:
    for target, products in (("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)):
        step = work(
            "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
            "%k = bf16[2,128,4,64]{3,2,1,0} parameter(1)",
            f"%c = (bf16[2,128,4,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k), "
            f'custom_call_target="__cudnn${target}", '
            'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16",'
            '"dimensions":["2","4","128","128"]}}}',
        )
        assert step.flops == {"bf16": products * 2 * 2 * 4 * 128 * 128 * 64}


@pytest.mark.parametrize(
    ("shapes", "window", "labels", "products"),
    [
        # An image of 6 with a kernel of 3 and one column of padding on each side: 16 of 18 places meet the image.
        (((2, 6, 5), (3, 5, 7), (2, 6, 7)), "size=3 pad=1_1", "b0f_0io->b0f", 2 * 7 * 5 * 16),
        # Stride 2, by hand: results 0, 1, 2 meet 0..2, 2..4, 4..5.
        (((1, 6, 1), (3, 1, 1), (1, 3, 1)), "size=3 stride=2 pad=0_1", "b0f_0io->b0f", 8),
        # How the TPU compiler writes 4 products of [3, 5] by [5, 7]: each result meets one tap of the kernel.
        (
            ((4, 3, 5), (4, 5, 7), (4, 3, 7)),
            "size=4 stride=3 pad=0_0 lhs_dilate=4",
            "0bf_0io->0bf",
            4 * 3 * 5 * 7,
        ),
        # The same, for the heads of an attention, which lie on an axis of padding: a full product for each head.
        (((1, 3, 5), (4, 5, 7), (4, 3, 7)), "size=4 pad=3_3 rhs_reversal=1", "0bf_0io->0bf", 4 * 3 * 5 * 7),
    ],
)
def test_a_convolution_counts_what_meets_the_image(
    shapes: tuple[tuple[int, ...], ...], window: str, labels: str, products: int
) -> None:
    image, kernel, result = (",".join(map(str, shape)) for shape in shapes)
    step = work(
        f"%x = bf16[{image}]{{2,1,0}} parameter(0)",
        f"%y = bf16[{kernel}]{{2,1,0}} parameter(1)",
        f"%c = f32[{result}]{{2,1,0}} convolution(%x, %y), window={{{window}}}, dim_labels={labels}",
    )
    assert step.flops == {"bf16": 2 * products}


def test_convolutions_against_a_count_of_all_places() -> None:
    for stride, pad, dilation, spread, kernel in itertools.product(
        (1, 2, 3, 4), (-1, 0, 2), (1, 2, 3, 4), (1, 2), (1, 3, 4)
    ):
        result = 5
        positions = (
            position * stride + tap * spread - pad
            for position, tap in itertools.product(range(result), range(kernel))
        )
        met = sum(position % dilation == 0 and 0 <= position // dilation < 3 for position in positions)
        parsed = read_program(
            program(
                "%x = bf16[1,3,1]{2,1,0} parameter(0)",
                f"%y = bf16[{kernel},1,1]{{2,1,0}} parameter(1)",
                f"%c = f32[1,{result},1]{{2,1,0}} convolution(%x, %y), window={{size={kernel} stride={stride} "
                f"pad={pad}_9 lhs_dilate={dilation} rhs_dilate={spread}}}, dim_labels=b0f_0io->b0f",
            )
        )
        assert parsed.flops.total() == 2 * met


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("convForward", ("2,6,5", "3,5,7"), "2,6,7"),
        ("convBackwardInput", ("2,6,7", "3,5,7"), "2,6,5"),
        ("convBackwardFilter", ("2,6,5", "2,6,7"), "3,5,7"),
    ],
)
def test_convolutions_by_cudnn_and_their_gradients_count_alike(
    target: str, operands: tuple[str, str], result: str
) -> None:
    step = work(
        *(
            f"%{name} = f16[{shape}]{{2,1,0}} parameter(0)"
            for name, shape in zip("xy", operands, strict=True)
        ),
        f"%c = (f16[{result}]{{2,1,0}}, u8[9]{{0}}) custom-call(%x, %y), window={{size=3 pad=1_1}}, "
        f'dim_labels=b0f_0io->b0f, custom_call_target="__cudnn${target}"',
    )
    assert step.flops == {"bf16": 2 * 2 * 7 * 5 * 16}


@pytest.mark.parametrize(
    ("left", "right", "speed"),
    [
        ("bf16", "f32", "f32"),
        ("f8e4m3fn", "f8e5m2", "f8"),
        ("s8", "u8", "s8"),
        ("u8", "u8", "s8"),
        ("f64", "f64", "f64"),
    ],
)
def test_the_wider_factor_decides_the_speed(left: str, right: str, speed: str) -> None:
    for first, second in ((left, right), (right, left)):
        factors = (f"%a = {first}[8,4]{{1,0}} parameter(0)", f"%b = {second}[4,2]{{1,0}} parameter(1)")
        dot = "%p = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        assert work(*factors, dot).flops == {speed: 2 * 8 * 2 * 4}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dot(%x, %y)", "product c: expected its contracting dimensions, got none"),
        ("convolution(%x, %y), window={size=1}", "convolution c: expected dim_labels, got none"),
        (
            'custom-call(%x, %y), custom_call_target="__cudnn$fmha"',
            "attention c: expected the shape of its scores",
        ),
    ],
)
def test_a_product_without_its_dimensions_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        work(*BATCH, f"%c = f32[4,16,64]{{2,1,0}} {line}")


def test_what_multiplies_nothing_has_no_operations() -> None:
    for line in ('custom-call(%x), custom_call_target="__cudnn$norm"', "custom-call(%x)", "negate(%x)"):
        assert work(*BATCH, f"%c = f32[4,16,32]{{2,1,0}} {line}").flops == {}
