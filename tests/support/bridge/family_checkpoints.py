"""Hugging Face models trained for a step, saved by stock tools, and read by stock tools after a conversion."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.bridge.family_models import flax_weights, hf_model, tokens

HYPERPARAMETERS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-9, "weight_decay": 0.1}


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **HYPERPARAMETERS)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One step on random tokens, in which every parameter has a gradient. Returns the loss before the update."""
    rows = torch.from_numpy(tokens(2, 20, seed=seed)).long()
    optimizer.zero_grad()
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained(
    family: str, *, steps: int = 2, seed: int = 0, **changes: Any
) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A small model and its optimizer after ``steps`` real steps."""
    model = hf_model(family, seed=seed, **changes)
    optimizer = optimizer_of(model)
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def save_dcp(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the two trees of `get_state_dict` with stock DCP, as training scripts do."""
    weights, optim = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optim}, checkpoint_id=path, no_dist=True)


def load_dcp(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, partial: bool = False
) -> None:
    """Load into a model and an optimizer after different steps. ``partial``: keep values that the checkpoint lacks."""
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": optim}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load(state, checkpoint_id=path, no_dist=True, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def dcp_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a DCP checkpoint by name, read by stock DCP."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in metadata.items()
        if isinstance(info, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def orbax_tree(path: Path) -> dict[str, Any]:
    """The tree of arrays, read by stock Orbax."""
    # Imported here, so that tests of torch_impl need no JAX.
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore(path)


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}/")
        else:
            yield before + key, np.asarray(value)


def moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, np.ndarray]:
    """The optimizer's ``key`` of every parameter under the names and in the shapes of our flax model."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, original in zip(holder.parameters(), model.parameters(), strict=True):
            parameter.copy_(optimizer.state[original][key])
    return flax_weights(holder)


def config_json(model: torch.nn.Module) -> dict[str, Any]:
    """The config.json that ``save_pretrained`` writes."""
    return json.loads(model.config.to_json_string(use_diff=False))


def head_dim(model: torch.nn.Module) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def same_bits(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Names, dtypes, shapes and every bit."""
    assert sorted(tensors) == sorted(expected)
    for name, array in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape), name
        assert tensors[name].tobytes() == array.tobytes(), name
