"""The DCP tree and the Orbax tree of a small decoder as arrays, made without the mapping."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.support.bridge.bits import random_bits

D, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 6, 3, 4, 2, 5, 7, 11

MODEL = {"d_model": D, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}


def torch_shapes(*, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The decoder's torch parameters in a small size in which no two axes are equal."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, D)}
    for i in range(LAYERS):
        layer = f"layers.{i}."
        shapes |= {
            layer + "attention_norm.weight": (D,),
            layer + "attention.wq.weight": (HEADS * HEAD_DIM, D),
            layer + "attention.wk.weight": (KV_HEADS * HEAD_DIM, D),
            layer + "attention.wv.weight": (KV_HEADS * HEAD_DIM, D),
            layer + "attention.wo.weight": (D, HEADS * HEAD_DIM),
            layer + "mlp_norm.weight": (D,),
            layer + "mlp.w13.weight": (2 * FF, D),
            layer + "mlp.w2.weight": (D, FF),
        }
    shapes["norm.weight"] = (D,)
    return shapes if tied else {**shapes, "lm_head.weight": (VOCAB, D)}


def dcp_arrays(*, tied: bool = False, step: int = 40, moments: bool = True) -> dict[str, np.ndarray]:
    """A whole DCP checkpoint of the small decoder. Every tensor has different values."""
    arrays: dict[str, np.ndarray] = {}
    float32 = np.dtype(np.float32)
    for k, (name, shape) in enumerate(torch_shapes(tied=tied).items()):
        arrays[f"model.{name}"] = random_bits(shape, float32, 3 * k)
        if moments:
            arrays[f"optimizer.state.{name}.exp_avg"] = random_bits(shape, float32, 3 * k + 1)
            arrays[f"optimizer.state.{name}.exp_avg_sq"] = random_bits(shape, float32, 3 * k + 2)
            arrays[f"optimizer.state.{name}.step"] = np.asarray(step, np.float32)
    arrays |= {f"train.model.{name}": np.asarray(value, np.int64) for name, value in MODEL.items()}
    arrays["train.step"] = np.asarray(step, np.int64)
    arrays["train.data.corpus_sha256"] = np.arange(32, dtype=np.uint8)
    return arrays


def expected_orbax(arrays: Mapping[str, np.ndarray], *, stacked: bool = False) -> dict[str, np.ndarray]:
    """The Orbax tree of a DCP tree, written out by hand with NumPy reshapes on whole arrays."""
    result = {name.replace(".", "/"): a for name, a in arrays.items() if name.startswith("train.")}
    steps = [a for name, a in arrays.items() if name.endswith(".step") and name.startswith("optimizer.")]
    if steps:
        result["opt_state/count"] = steps[0].astype(np.int32)
    trees = {"params/": ("model.", ""), "opt_state/mu/": ("optimizer.state.", ".exp_avg")}
    trees["opt_state/nu/"] = ("optimizer.state.", ".exp_avg_sq")
    for prefix, (before, after) in trees.items():

        def get(weight: str, before: str = before, after: str = after) -> np.ndarray:
            return arrays[before + weight + after]

        if before + "embed.weight" + after not in arrays:
            continue
        result[prefix + "embed/embedding"] = get("embed.weight")
        result[prefix + "norm/scale"] = get("norm.weight")
        if before + "lm_head.weight" + after in arrays:
            result[prefix + "lm_head/kernel"] = get("lm_head.weight").T
        layers: dict[str, list[np.ndarray]] = {}
        for i in range(LAYERS):
            layer = f"layers.{i}."
            of_layer = {
                "attention_norm/scale": get(layer + "attention_norm.weight"),
                "mlp_norm/scale": get(layer + "mlp_norm.weight"),
                "mlp/gate/kernel": get(layer + "mlp.w13.weight")[:FF].T,
                "mlp/up/kernel": get(layer + "mlp.w13.weight")[FF:].T,
                "mlp/down/kernel": get(layer + "mlp.w2.weight").T,
                "attention/out/kernel": get(layer + "attention.wo.weight").T.reshape(HEADS, HEAD_DIM, D),
            }
            for torch_name, jax_name in (("wq", "query"), ("wk", "key"), ("wv", "value")):
                weight = get(f"{layer}attention.{torch_name}.weight")
                of_layer[f"attention/{jax_name}/kernel"] = weight.T.reshape(D, -1, HEAD_DIM)
            for name, array in of_layer.items():
                layers.setdefault(name, []).append(array)
        for name, members in layers.items():
            if stacked:
                result[f"{prefix}layers/{name}"] = np.stack(members)
            else:
                result |= {f"{prefix}layers/{i}/{name}": array for i, array in enumerate(members)}
    return {name: np.asarray(array, order="C") for name, array in result.items()}
