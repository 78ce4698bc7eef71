"""The groups of ``layouts.json``: plans that both packages must reproduce to the byte.

Rewrite the file after a deliberate change of the planner with ``python -m tests.golden.layouts``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
EQUAL: Shapes = {f"expert{i}": (6, 5) for i in range(9)}


def cases() -> Iterator[tuple[Shapes, int, str, int]]:
    """``(shapes, num_shards, granularity, rows)`` of each golden plan."""
    for shapes in (DECODER_BLOCK, DECODER_ROOT):
        for num_shards in (1, 2, 3, 4, 8):
            yield shapes, num_shards, "row", 1
    yield TIED_ROOT, 3, "row", 1
    yield DECODER_BLOCK, 4, "block", 32
    yield DECODER_BLOCK, 3, "block", 128
    yield DECODER_BLOCK, 4, "tensor", 1
    yield DECODER_BLOCK, 1000, "row", 1
    yield {}, 3, "row", 1
    yield {"none": (0,), "hollow": (3, 0, 2)}, 4, "row", 1
    yield {"scalar": ()}, 1, "row", 1
    yield {"scalar": ()}, 5, "row", 1
    yield {f"scalar{i}": () for i in range(7)}, 3, "row", 1
    yield {"vector": (1000,)}, 7, "row", 1
    yield {"matrix": (3, 11)}, 8, "row", 1
    yield {"matrix": (64, 48)}, 16, "row", 1
    yield {"tall": (97, 3), "wide": (3, 97)}, 4, "row", 1
    for num_shards in (1, 2, 3, 5, 13):
        yield MIXED, num_shards, "row", 1
    yield MIXED, 3, "block", 2
    yield MIXED, 3, "block", 100
    yield MIXED, 4, "tensor", 1
    yield ODD_ROWS, 2, "row", 1
    yield ODD_ROWS, 5, "row", 1
    yield ODD_ROWS, 3, "block", 3
    yield EQUAL, 4, "row", 1
    yield EQUAL, 4, "tensor", 1
    yield LLAMA3_8B_LAYER, 8, "row", 1
    yield LLAMA3_8B_LAYER, 1024, "row", 1
    yield GPT_OSS_EXPERTS, 64, "row", 1
    yield GPT_OSS_EXPERTS, 64, "block", 128
    yield SIGLIP_PATCH, 6, "row", 1
    yield SIGLIP_PATCH, 64, "row", 1


def golden() -> list[dict[str, Any]]:
    """The content of ``layouts.json``, planned by ``torch_impl``."""
    from torch_impl.layout import plan_layout

    entries = []
    for shapes, num_shards, granularity, rows in cases():
        layout = plan_layout(shapes, num_shards, granularity=granularity, rows=rows)
        entries.append(
            {
                "shapes": [[name, list(shape)] for name, shape in shapes.items()],
                "num_shards": num_shards,
                "granularity": granularity,
                "rows": rows,
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
