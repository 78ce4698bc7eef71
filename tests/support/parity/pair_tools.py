"""Tools for all pairs: random weights at a scale where every weight matters, converted into the JAX model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingTable, make_plan
from bridge.parity.compare.parity import parity
from bridge.parity.report_page.report import ParityReport
from tests.support.bridge.memory_reader import MemoryReader

VOCABULARY = 61
# Each of these programs runs once, and compiling them takes most of the time.
_QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
EMBEDDINGS = ("embed", "wte", "wpe", "shared", "cls_token", "relative")


@dataclass(frozen=True)
class Pair:
    """One model in PyTorch and in JAX, with the same weights.

    ``axes``: sizes that the mapping needs. ``batch``: the only argument of both models. For ``"next_token"`` it is int
    tokens ``[B, T + 1]``, of which a model gets the first T. ``loss``: ``"next_token"`` is the mean
    cross entropy of the next tokens, ``"probe"`` any smooth function of the output.
    """

    name: str
    torch_model: torch.nn.Module
    jax_model: nnx.Module
    mapping: MappingTable
    axes: dict[str, int] = field(default_factory=dict)
    batch: Any = None
    loss: Literal["next_token", "probe"] = "next_token"


def randomize(model: torch.nn.Module, seed: int, *, norm: float = 1.0, embedding: float = 0.5) -> None:
    """Fill every parameter: norms about ``norm``, biases about zero, kernels so that outputs are as large as inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_norm = path.endswith("weight")
                parameter.copy_(norm + 0.1 * noise if is_norm else 0.2 * noise)
            elif any(word in path for word in EMBEDDINGS) and parameter.ndim < 4:
                parameter.copy_(embedding * noise)
            else:
                parameter.copy_(1.2 * noise / math.sqrt(_fan_in(model, path, parameter)))
        for path, buffer in model.named_buffers():
            noise = torch.randn(buffer.shape, generator=generator)
            if path.endswith("running_mean"):
                buffer.copy_(0.3 * noise)
            elif path.endswith("running_var"):
                buffer.copy_(torch.exp(0.3 * noise))


def _fan_in(model: torch.nn.Module, path: str, parameter: torch.Tensor) -> int:
    owner = model.get_submodule(path.rpartition(".")[0])
    if type(owner).__name__ == "Conv1D":
        return parameter.shape[0]
    return math.prod(parameter.shape[1:]) if parameter.ndim == 4 else parameter.shape[-1]


def torch_arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Parameters, each once, and running statistics, by name."""
    statistics = {n: b for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))}
    named = dict(model.named_parameters()) | statistics
    return {name: tensor.detach().numpy().copy() for name, tensor in named.items()}


def translated(
    arrays: Mapping[str, np.ndarray], mapping: MappingTable, axes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Arrays of the torch model under the names and in the shapes of the JAX model."""
    reader = MemoryReader("safetensors", arrays)
    into = "flax" if "flax" in mapping.conventions else "jax"
    plan = make_plan(reader, "orbax", mapping.with_axes(axes), into=into)
    return {
        name.removeprefix("params/"): tensor.read(reader, Box.whole(tensor.shape))
        for name, tensor in plan.tensors.items()
    }


def flat_state(model: nnx.Module) -> dict[str, Any]:
    """Parameters and running statistics of a JAX model by path."""
    state = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def load(model: nnx.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Set every parameter and running statistic of a JAX model."""
    state = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
    flat = flat_state(model)
    shapes = {path: variable.get_raw_value().shape for path, variable in flat.items()}
    array_shapes = {path: array.shape for path, array in arrays.items()}
    assert array_shapes == shapes, (
        f"given {sorted(array_shapes.items())}, the model has {sorted(shapes.items())}"
    )
    values = [
        (path, variable.replace(jnp.asarray(arrays["/".join(map(str, path))])))
        for path, variable in nnx.to_flat_state(state)
    ]
    nnx.update(model, nnx.from_flat_state(values))


_PARTS = {
    "dense": (("weight : o i", "kernel : i o"), ("bias", "bias")),
    "kernel": (("weight : o i", "kernel : i o"),),
    "conv": (("weight : o i y x", "kernel : y x i o"), ("bias", "bias")),
    "norm": (("weight", "scale"), ("bias", "bias")),
    "scale": (("weight", "scale"),),
    "embed": (("weight", "embedding"),),
}


def with_rules(text: str) -> str:
    """A mapping in which lines such as ``dense up layers/up`` stand for the rules of all tensors of a module."""
    lines = []
    for line in text.splitlines():
        what, *paths = line.split() or [""]
        for torch_name, jax_name in _PARTS.get(what, ()):
            lines.append(f'{{torch = "{paths[0]}.{torch_name}", jax = "{paths[1]}/{jax_name}"}},')
        if what not in _PARTS:
            lines.append(line)
    return "\n".join(lines)


def paired(
    name: str,
    torch_model: torch.nn.Module,
    jax_model: nnx.Module,
    mapping: MappingTable,
    batch: Any,
    *,
    axes: dict[str, int] | None = None,
    loss: Literal["next_token", "probe"] = "next_token",
) -> Pair:
    """The pair, with the weights of the torch model in the JAX model."""
    load(jax_model, translated(torch_arrays(torch_model), mapping, axes or {}))
    return Pair(name, torch_model, jax_model, mapping, axes or {}, batch, loss)


def tokens(seed: int, rows: int = 3, length: int = 17) -> np.ndarray:
    """Int32 ``[rows, length]``, each row different."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length)).astype(np.int32)


def torch_output(output: Any) -> torch.Tensor:
    """The one array that a torch model is about."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return output


def torch_run(pair: Pair, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients by parameter, with parameters and buffers in ``dtype``; the model stays as it is."""
    model = copy.deepcopy(pair.torch_model).to(dtype)
    loss = _torch_loss(pair, model)
    loss.backward()
    gradients = {
        name: np.zeros(p.shape) if p.grad is None else p.grad.double().numpy()
        for name, p in model.named_parameters()
    }
    return float(loss.detach()), gradients


def _torch_loss(pair: Pair, model: torch.nn.Module) -> torch.Tensor:
    if pair.loss == "next_token":
        ids = torch.from_numpy(pair.batch).long()
        logits = torch_output(model(ids[:, :-1])).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    batch = torch.from_numpy(pair.batch)
    if batch.is_floating_point():
        batch = batch.to(next(model.parameters()).dtype)
    output = torch_output(model(batch if batch.is_floating_point() else batch.long()))
    return 0.5 * torch.mean((output - torch.from_numpy(_probe(output.shape)).to(output.dtype)) ** 2)


def _probe(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape)


def jax_loss(pair: Pair, model: nnx.Module) -> jax.Array:
    """The loss of one of a pair's JAX models."""
    if pair.loss == "next_token":
        logits = model(pair.batch[:, :-1])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        chosen = jnp.take_along_axis(logits, pair.batch[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
    batch = jnp.asarray(pair.batch)
    if jnp.issubdtype(batch.dtype, jnp.floating):
        batch = batch.astype(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    output = model(batch)
    return 0.5 * jnp.mean((output - jnp.asarray(_probe(output.shape), output.dtype)) ** 2)


def jax_run(pair: Pair, dtype: Any = jnp.float32) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients by parameter, with floating state in ``dtype``; the model stays as it is."""
    parts: Any = nnx.split(pair.jax_model, nnx.Param, ...)
    graphdef, params, rest = parts

    def cast(part: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, part)

    def loss(params: Any, rest: Any) -> jax.Array:
        return jax_loss(pair, nnx.merge(graphdef, params, rest, copy=True))

    value, gradients = jax.jit(jax.value_and_grad(loss), compiler_options=_QUICK)(cast(params), cast(rest))
    named = {
        "/".join(map(str, path)): np.asarray(variable.get_raw_value(), np.float64)
        for path, variable in nnx.to_flat_state(gradients)
    }
    return float(value), named


def compare_pair(pair: Pair, **options: Any) -> ParityReport:
    """``parity`` of both models, without training unless ``options`` say otherwise."""
    return parity(
        pair.torch_model,
        pair.jax_model,
        pair.batch,
        **{"mapping": pair.mapping, "axes": pair.axes, "loss": pair.loss, "steps": 0} | options,
    )
