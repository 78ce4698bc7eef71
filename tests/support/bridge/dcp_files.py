"""Genuine DCP checkpoints of stock PyTorch, and tensors as bits."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from bridge.core.formats.dcp.archive import StoredTensor, find_records, tensor_in
from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.tensors.base import DTYPES


def stock_save(state: dict[str, Any], path: Path, writer: dcp.StorageWriter | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a save in a single process
        dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)


def stock_load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def stock_load_all(path: Path, scratch: Path) -> dict[str, Any]:
    """The whole checkpoint as the nested dict that stock PyTorch reads."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, scratch)
    return torch.load(scratch, weights_only=True)


def stock_archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The same bits as a tensor."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:  # a view without bytes has no usable stride
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).view(dtype).reshape(array.shape)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The same bits as an array, in row-major order."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, DTYPES[str(tensor.dtype).removeprefix("torch.")]).reshape(tuple(tensor.shape))


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def edit_metadata(path: Path, edit: Callable[[Metadata], object]) -> None:
    """Change the genuine `.metadata` of a checkpoint."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata, protocol=4))


def find_tensor(file: FileView, offset: int, length: int, what: str) -> StoredTensor:
    """Where and how one archive stores its tensor, without what is known of other archives."""
    return tensor_in(file, find_records(file, offset, length, what), what)
