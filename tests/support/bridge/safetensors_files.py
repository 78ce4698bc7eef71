"""safetensors files by the stock library, by `transformers`, and byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bridge.core.formats.safetensors.header import DTYPE_NAMES
from bridge.core.formats.tensors.base import DTYPES
from tests.support.bridge.bits import random_bits
from tests.support.bridge.dcp_files import tensor_of

# torch has no name in the stock library for the last one, which the format has.
STOCK_DTYPES = [name for name in DTYPE_NAMES.values() if name != "float8_e8m0fnu"]


def stock_file(arrays: Mapping[str, np.ndarray], path: Path, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor_of(array) for name, array in arrays.items()}, path, metadata)
    return path


def raw_file(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"") -> Path:
    """Any header, valid or not, and any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one_of_each() -> dict[str, np.ndarray]:
    """A tensor of every dtype of the stock library, a scalar, and an empty tensor."""
    arrays = {
        f"layers.{i}.{name}": random_bits((3 + i, 4), DTYPES[name], i) for i, name in enumerate(STOCK_DTYPES)
    }
    return {
        **arrays,
        "scalar": random_bits((), np.dtype("int32"), 50),
        "none": random_bits((0, 3), np.dtype("float32"), 51),
    }


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()
