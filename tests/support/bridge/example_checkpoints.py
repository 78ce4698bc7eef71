"""The checkpoints that ``twinshard convert --example`` ships: ``python -m tests.support.bridge.example_checkpoints``.

A small Llama with AdamW state after 40 steps: ``torch`` (DCP) with the names of Hugging Face, and ``by_hand``
(safetensors) with the names of flax, in which one square matrix was not transposed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import bridge.examples
from bridge.checkpoints.convert import convert
from bridge.core.formats import create_checkpoint
from bridge.core.formats.files.manifest import MANIFEST_FILE, without_certificate

SHIPPED = Path(bridge.examples.__file__).parent / "files" / "convert"
CHECKPOINTS = ("torch", "by_hand")
_WIDTH, _HIDDEN, _LAYERS, _HEADS, _KEY_HEADS, _VOCABULARY = 8, 16, 2, 2, 1, 32
_CONFIG = {
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEY_HEADS,
    "vocab_size": _VOCABULARY,
    "rms_norm_eps": 1e-5,
}
_TRANSPOSED = "model.layers.1.self_attn.o_proj.weight"


def write_checkpoints(folder: Path) -> None:
    """Write both checkpoints into ``folder``, with the same bytes each time."""
    arrays = dict(_arrays())
    _write(folder / "torch", arrays)
    with TemporaryDirectory() as scratch:
        # The kernel of a correct port is the transpose of torch's matrix.
        _write(Path(scratch, "torch"), {**arrays, _TRANSPOSED: arrays[_TRANSPOSED].T})
        convert(Path(scratch, "torch"), folder / "by_hand", mapping="llama", into="flax", to="safetensors")
    # A script wrote it, the example says, and the certificate would tell otherwise.
    manifest = folder / "by_hand" / MANIFEST_FILE
    manifest.write_bytes(without_certificate(manifest.read_bytes())[0])


def _arrays() -> Iterator[tuple[str, np.ndarray]]:
    for number, (name, shape) in enumerate(_shapes()):
        # Multiples of 1/1024, the same on each machine.
        counted = (np.arange(np.prod(shape)) * 7919 + 104729 * number) % 1009
        values = (counted.reshape(shape) / 1024 - 0.5).astype(np.float32)
        state = f"optimizer.state.{name}"
        yield name, values
        yield f"{state}.exp_avg", values / 64
        yield f"{state}.exp_avg_sq", values**2 / 4096
        yield f"{state}.step", np.asarray(40, np.float32)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    keys = _WIDTH // _HEADS * _KEY_HEADS
    yield "model.embed_tokens.weight", (_VOCABULARY, _WIDTH)
    for layer in range(_LAYERS):
        for name, shape in (
            ("input_layernorm", (_WIDTH,)),
            ("self_attn.q_proj", (_WIDTH, _WIDTH)),
            ("self_attn.k_proj", (keys, _WIDTH)),
            ("self_attn.v_proj", (keys, _WIDTH)),
            ("self_attn.o_proj", (_WIDTH, _WIDTH)),
            ("post_attention_layernorm", (_WIDTH,)),
            ("mlp.gate_proj", (_HIDDEN, _WIDTH)),
            ("mlp.up_proj", (_HIDDEN, _WIDTH)),
            ("mlp.down_proj", (_WIDTH, _HIDDEN)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (_WIDTH,)
    yield "lm_head.weight", (_VOCABULARY, _WIDTH)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with create_checkpoint(path, "dcp") as writer:
        for name, array in arrays.items():
            stored = writer.add_tensor((name,), array.shape, array.dtype).name
            for box in writer.chunks(stored):
                writer.write(stored, box, np.asarray(array[box.slices()], order="C"))
    (path / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in CHECKPOINTS:
        shutil.rmtree(SHIPPED / name, ignore_errors=True)
    write_checkpoints(SHIPPED)
