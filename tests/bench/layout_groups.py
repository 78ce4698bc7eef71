"""The 34 parameter groups of the layout benchmark, as ``{name: shape}`` in model order.

Shapes come from public model configurations. A group is one layer, its experts, or a whole model. ``2-D`` stores each
expert's matrices separately, ``3-D`` stacks all experts of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def _named(shapes: Iterable[Shape]) -> Shapes:
    return {f"p{i}": shape for i, shape in enumerate(shapes)}


def _dense_layer(hidden: int, ffn: int, query: int, key: int) -> list[Shape]:
    attention: list[Shape] = [(hidden,), (query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    return [*attention, (hidden,), (ffn, hidden), (ffn, hidden), (hidden, ffn)]


def _ends(vocabulary: int, hidden: int) -> list[Shape]:
    return [(vocabulary, hidden), (hidden,), (vocabulary, hidden)]


def _experts(count: int, hidden: int, ffn: int) -> list[Shape]:
    return [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * count


def _deepseek_attention() -> list[Shape]:
    low_rank: list[Shape] = [(7168,), (1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,)]
    return [*low_rank, (32768, 512), (7168, 16384), (7168,)]


def _gpt2_layer(h: int) -> list[Shape]:
    attention: list[Shape] = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,)]
    return [*attention, (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]


def reference_groups() -> dict[str, Shapes]:
    """``{group: {parameter: shape}}``."""
    groups: dict[str, list[Shape]] = {}

    for name, config, layers, vocabulary in (
        ("Llama3-8B", (4096, 14336, 4096, 1024), 32, 128256),
        ("Llama3-70B", (8192, 28672, 8192, 1024), 80, 128256),
        ("Llama3-405B", (16384, 53248, 16384, 1024), 126, 128256),
        ("Llama2-7B", (4096, 11008, 4096, 4096), 32, 32000),
        ("Qwen2.5-7B", (3584, 18944, 3584, 512), 28, 152064),
    ):
        layer = _dense_layer(*config)
        groups[f"{name} layer"] = layer
        groups[f"{name} whole"] = layer * layers + _ends(vocabulary, config[0])

    dense: list[Shape] = [(4096,), (8192, 4096), (512, 4096), (512, 4096), (128,), (128,), (4096, 8192)]
    dense += [(4096,), (128, 4096)]
    experts = _experts(128, 4096, 1536)
    stacks: list[Shape] = [(128, 3072, 4096), (128, 4096, 1536)]
    groups["Qwen3-235B non-expert"] = dense
    groups["Qwen3-235B layer, 2-D"] = dense + experts
    groups["Qwen3-235B layer, 3-D"] = dense + stacks
    groups["Qwen3-235B experts, 3-D"] = stacks
    groups["Qwen3-235B whole, 2-D"] = (dense + experts) * 94 + _ends(151936, 4096)

    attention: list[Shape] = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096,)]
    experts = [(14336, 4096), (4096, 14336), (14336, 4096)] * 8
    layer = [*attention, (8, 4096), *experts]
    groups["Mixtral layer, 2-D"] = layer
    groups["Mixtral experts, 3-D"] = [(8, 28672, 4096), (8, 4096, 14336)]
    groups["Mixtral whole, 2-D"] = layer * 32 + _ends(32000, 4096)

    mla = _deepseek_attention()
    shared: list[Shape] = [(2048, 7168), (2048, 7168), (7168, 2048), (256, 7168), (256,)]
    dense = [*mla, (18432, 7168), (18432, 7168), (7168, 18432)]
    experts = _experts(256, 7168, 2048)
    groups["DeepSeek-V3 non-expert"] = mla + shared
    groups["DeepSeek-V3 layer, 2-D"] = mla + shared + experts
    groups["DeepSeek-V3 dense layer"] = dense
    groups["DeepSeek-V3 experts, 3-D"] = [(256, 4096, 7168), (256, 7168, 2048)]
    groups["DeepSeek-V3 whole, 2-D"] = dense * 3 + (mla + shared + experts) * 58 + _ends(129280, 7168)

    attention = [
        (2880,),
        (4096, 2880),
        (4096,),
        (512, 2880),
        (512,),
        (512, 2880),
        (512,),
        (2880, 4096),
        (2880,),
    ]
    router: list[Shape] = [(64,), (2880,), (128, 2880), (128,)]
    stacks = [(128, 2880, 5760), (128, 5760), (128, 2880, 2880), (128, 2880)]
    layer = attention + router + stacks
    groups["GPT-OSS-120B layer"] = layer
    groups["GPT-OSS-120B experts"] = stacks
    groups["GPT-OSS-120B whole"] = layer * 36 + _ends(201088, 2880)

    for name, h, layers in (("GPT-2 small", 768, 12), ("GPT-2 XL", 1600, 48)):
        layer = _gpt2_layer(h)
        groups[f"{name} layer"] = layer
        groups[f"{name} whole"] = [*(layer * layers), (50257, h), (1024, h), (h,), (h,)]

    h = 1152
    square: list[Shape] = [(h, h), (h,)]
    layer = [(h,), (h,), *(square * 4), (h,), (h,), (4304, h), (4304,), (h, 4304), (h,)]
    groups["SigLIP-so400m layer"] = layer
    groups["SigLIP-so400m whole"] = [*(layer * 27), (h, 3, 14, 14), (h,), (729, h), (h,), (h,)]

    h = 1280
    layer = [
        (h,),
        (3 * h, h),
        (3 * h,),
        (h, h),
        (h,),
        (h,),
        (3420, h),
        (3420,),
        (3420, h),
        (3420,),
        (h, 3420),
        (h,),
    ]
    merger: list[Shape] = [(h, 3, 2, 14, 14), (5120, 5120), (5120,), (3584, 5120), (3584,), (h,)]
    groups["Qwen2.5-VL ViT layer"] = layer
    groups["Qwen2.5-VL ViT whole"] = layer * 32 + merger
    return {name: _named(shapes) for name, shapes in groups.items()}
