"""Small scheduled programs as text, of a size at which a person can do the sums."""

from __future__ import annotations

from bridge.compiling.timing.program import Work, read_program


def program(*lines: str, computations: str = "", partitions: int = 8) -> str:
    """An entry computation of ``lines``, after others."""
    head = f"HloModule test, is_scheduled=true, num_partitions={partitions}"
    body = "\n".join(f"  {line}" for line in lines)
    return f"{head}\n\n{computations}\n\nENTRY %main (a: f32[1]) -> f32[1] {{\n{body}\n}}\n"


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"


def work(*lines: str, computations: str = "") -> Work:
    """The only operation that costs something."""
    (step,) = read_program(program(*lines, computations=computations)).steps
    assert isinstance(step, Work)
    return step


# 2 x 512 x 256 x 128 operations on 2 x (512 x 256 + 256 x 128 + 512 x 128) bytes.
FACTORS = ("%a = bf16[512,256]{1,0} parameter(0)", "%b = bf16[256,128]{1,0} parameter(1)")
PRODUCT = "%p = bf16[512,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PRODUCT_FLOPS = 2 * 512 * 256 * 128
PRODUCT_BYTES = 2 * (512 * 256 + 256 * 128 + 512 * 128)

SHARD = "%s = f32[1000]{0} parameter(2)"
GATHER_START = (
    "%gs = (f32[1000]{0}, f32[8000]{0}) all-gather-start(%s), channel_id=1, "
    "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
)
GATHER_DONE = "%gd = f32[8000]{0} all-gather-done(%gs)"
GATHER_BYTES = 4 * 8000
