"""The groups of ``layouts.json``: plans that both packages must reproduce to the byte.

Rewrite the file after a deliberate change of the planner with ``python -m tests.sharding.golden.layouts``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.layout_groups import reference_groups

PATH = Path(__file__).with_name("layouts.json")

Shapes = Mapping[str, tuple[int, ...]]

DECODER_BLOCK: Shapes = {
    "layers.0.attention_norm.weight": (331,),
    "layers.0.attention.wq.weight": (320, 331),
    "layers.0.attention.wk.weight": (80, 331),
    "layers.0.attention.wv.weight": (80, 331),
    "layers.0.attention.wo.weight": (331, 320),
    "layers.0.mlp_norm.weight": (331,),
    "layers.0.mlp.w13.weight": (1766, 331),
    "layers.0.mlp.w2.weight": (331, 883),
}
DECODER_ROOT: Shapes = {"embed.weight": (257, 331), "norm.weight": (331,), "lm_head.weight": (257, 331)}
TIED_ROOT: Shapes = {"embed.weight": (257, 331), "norm.weight": (331,)}
LLAMA3_8B_LAYER: Shapes = {
    "attention_norm": (4096,),
    "wq": (4096, 4096),
    "wk": (1024, 4096),
    "wv": (1024, 4096),
    "wo": (4096, 4096),
    "mlp_norm": (4096,),
    "w1": (14336, 4096),
    "w3": (14336, 4096),
    "w2": (4096, 14336),
}
GPT_OSS_EXPERTS: Shapes = {
    "gate_up": (128, 2880, 5760),
    "gate_up_bias": (128, 5760),
    "down": (128, 2880, 2880),
    "down_bias": (128, 2880),
}
SIGLIP_PATCH: Shapes = {"patch": (1152, 3, 14, 14), "patch_bias": (1152,), "position": (729, 1152)}
ODD_ROWS: Shapes = {f"odd{row}": (row % 7 + 2, row) for row in (11, 13, 17, 19, 23, 29, 31)}
MIXED: Shapes = {
    "scalar": (),
    "none": (0, 5),
    "vector": (17,),
    "matrix": (9, 7),
    "stack": (3, 4, 5),
    "kernel": (2, 3, 2, 3),
    "hollow": (4, 0, 3),
    "one": (1, 1),
}
WORKED_EXAMPLE: Shapes = {"wq": (7, 6), "wo": (6, 7), "up": (9, 6), "down": (6, 9), "norm": (6,)}
# The aligned packing is smaller than all that the search finds: shards of 24 elements instead of 25.
LCM_WINS: Shapes = {"a": (11,), "b": (11, 2), "c": (1, 12), "d": (4, 2), "e": (8, 8)}
# Here it is with the rows of a planner that knows no rows inside a slice: shards of 36 instead of 37.
COARSE_WINS: Shapes = {"a": (1, 3, 6), "b": (5, 4), "c": (5, 6, 3), "d": (5, 2), "e": (2, 3, 1)}
MANY_UNITS: Shapes = {f"w{row}": (row * 5 % 23 + 3, row) for row in (2, 3, 5, 7, 8, 9, 11, 13, 17, 19, 25)}
MANY_KINDS: Shapes = {f"k{i}": (i % 9 + 1, i * 7 % 31 + 1) for i in range(120)}
SHORT_BLOCKS: Shapes = {"a": (7, 5), "b": (11, 4), "c": (8, 5), "d": (31, 2), "e": (4, 4)}
REFERENCE = [
    ("DeepSeek-V3 non-expert", 256),
    ("DeepSeek-V3 dense layer", 4096),
    ("GPT-2 XL layer", 256),
    ("GPT-OSS-120B layer", 1024),
    ("Qwen2.5-VL ViT layer", 64),
    ("Llama2-7B layer", 16384),
]
EQUAL: Shapes = {f"expert{i}": (6, 5) for i in range(9)}


class Case(NamedTuple):
    """The arguments of one plan."""

    shapes: Shapes
    num_shards: int
    granularity: str | Mapping[str, str] = "row"
    rows: int = 1
    max_buffers: int = 3
    align: int | str = 1


def cases() -> Iterator[Case]:
    """What is planned."""
    for shapes in (DECODER_BLOCK, DECODER_ROOT):
        for num_shards in (1, 2, 3, 4, 8):
            yield Case(shapes, num_shards)
    yield Case(TIED_ROOT, 3)
    yield Case(DECODER_BLOCK, 4, "block", 32)
    yield Case(DECODER_BLOCK, 3, "block", 128)
    yield Case(DECODER_BLOCK, 4, "tensor")
    yield Case(DECODER_BLOCK, 1000)
    yield Case({}, 3)
    yield Case({"none": (0,), "hollow": (3, 0, 2)}, 4)
    yield Case({"scalar": ()}, 1)
    yield Case({"scalar": ()}, 5)
    yield Case({f"scalar{i}": () for i in range(7)}, 3)
    yield Case({"vector": (1000,)}, 7)
    yield Case({"matrix": (3, 11)}, 8)
    yield Case({"matrix": (64, 48)}, 16)
    yield Case({"tall": (97, 3), "wide": (3, 97)}, 4)
    for num_shards in (1, 2, 3, 5, 13):
        yield Case(MIXED, num_shards)
    yield Case(MIXED, 3, "block", 2)
    yield Case(MIXED, 3, "block", 100)
    yield Case(MIXED, 4, "tensor")
    yield Case(ODD_ROWS, 2)
    yield Case(ODD_ROWS, 5)
    yield Case(ODD_ROWS, 3, "block", 3)
    yield Case(EQUAL, 4)
    yield Case(EQUAL, 4, "tensor")
    yield Case(LLAMA3_8B_LAYER, 8)
    yield Case(LLAMA3_8B_LAYER, 1024)
    yield Case(GPT_OSS_EXPERTS, 64)
    yield Case(GPT_OSS_EXPERTS, 64, "block", 128)
    yield Case(SIGLIP_PATCH, 6)
    yield Case(SIGLIP_PATCH, 64)
    yield Case(MIXED, 3, "block(2)")
    yield Case(
        DECODER_BLOCK, 4, {"layers.0.attention.wq.weight": "tensor", "layers.0.mlp.w2.weight": "block(32)"}
    )
    yield Case(MIXED, 3, {"matrix": "block", "stack": "tensor"}, 2)
    for max_buffers in (1, 2, 3):
        yield Case(WORKED_EXAMPLE, 4, max_buffers=max_buffers)
        yield Case(LLAMA3_8B_LAYER, 256, max_buffers=max_buffers)
        yield Case(MANY_UNITS, 9, max_buffers=max_buffers)
    yield Case(LCM_WINS, 5)
    yield Case(COARSE_WINS, 4)
    for num_shards in (2, 3, 8, 64):
        yield Case(MANY_UNITS, num_shards)
    yield Case(MANY_KINDS, 5)
    yield Case(SHORT_BLOCKS, 4, "block", 3)
    for name, num_shards in REFERENCE:
        yield Case(reference_groups()[name], num_shards)
    for align in (8, 128, "auto"):
        for num_shards in (1, 3, 4, 16):
            yield Case(DECODER_BLOCK, num_shards, align=align)
        yield Case(DECODER_ROOT, 3, align=align)
        yield Case(MIXED, 3, align=align)
        yield Case(WORKED_EXAMPLE, 4, align=align)
        yield Case(LLAMA3_8B_LAYER, 1024, align=align)
        yield Case(SIGLIP_PATCH, 6, align=align)
        yield Case(GPT_OSS_EXPERTS, 64, align=align)
        yield Case({}, 3, align=align)
    yield Case(DECODER_BLOCK, 4, "block", 32, align=128)
    yield Case(DECODER_BLOCK, 4, "tensor", align=128)
    yield Case(MIXED, 3, "block", 2, align=3)
    yield Case(LCM_WINS, 5, align=3)


def golden() -> list[dict[str, Any]]:
    """The content of ``layouts.json``, planned by ``torch_impl``."""
    from bridge.core.sharding import plan_layout

    entries = []
    for case in cases():
        options = {"granularity": case.granularity, "rows": case.rows, "max_buffers": case.max_buffers}
        layout = plan_layout(case.shapes, case.num_shards, **options, align=case.align)
        # Absent: 1, as it was before there was one.
        options |= {"align": case.align} if case.align != 1 else {}
        entries.append(
            {
                "shapes": [[name, list(shape)] for name, shape in case.shapes.items()],
                "num_shards": case.num_shards,
                **options,
                "layout": json.loads(layout.to_json()),
                "fingerprint": layout.fingerprint,
            }
        )
    return entries


def render(entries: list[dict[str, Any]]) -> str:
    """One plan a line, so that a changed plan is one changed line."""
    return "[\n" + ",\n".join(json.dumps(entry, sort_keys=True) for entry in entries) + "\n]\n"


if __name__ == "__main__":
    PATH.write_text(render(golden()))
