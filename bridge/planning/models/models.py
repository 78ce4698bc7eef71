"""Models by name: ``llama3-8b``, ``decoder:CONFIG``, ``folder/config.json`` or ``package.module:Factory``.

The two runtimes may store one model in different shapes (PyTorch ``[out, in]`` and fused, JAX ``[in, out]`` and by
head), with different layouts and padding. So a name resolves to one ``Model`` for each runtime that can run the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from bridge.core.extras import install_advice
from bridge.core.text import did_you_mean
from bridge.planning.models.decoder_activations import decoder_activations
from bridge.planning.models.errors import PlanError
from bridge.planning.models.factory import Factory
from bridge.planning.models.formulas import Attention
from bridge.planning.models.language_models import (
    abstract_model,
    causal_lm_config,
    decoder_config,
    is_config,
    shape_of,
)
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.runtimes import RUNTIMES, framework, installed, part
from bridge.planning.models.shipped_models import SHIPPED, shape_model, shipped_model
from bridge.relay.config import ModelConfig


def resolve_models(
    name: str,
    runtimes: Sequence[str] = RUNTIMES,
    stacked: Sequence[str] = (),
    attention: Attention | None = None,
) -> dict[str, Model]:
    """``{runtime: model}`` for those of ``runtimes`` that can run the model. Raises ``PlanError`` if none can.

    stacked: dotted paths of modules that JAX scans: a model from a factory must have their parameters with a leading
    axis over layers. PyTorch has no such modules. attention: the kind to count, for a model planned by formulas;
    None for the kind that each runtime runs.
    """
    stacked = tuple(path.replace("/", ".") for path in stacked)
    prefix, colon, rest = name.partition(":")
    if name in SHIPPED:
        models = {
            "torch": shipped_model(name, "torch", attention),
            "jax": _stacked_shape(shipped_model(name, "jax", attention), stacked),
        }
    elif prefix == "decoder" and colon:
        _check_own_attention(name, attention, runs=Attention.plain)
        config = decoder_config(rest)
        models = {
            runtime: _decoder(runtime, name, config, stacked) for runtime in runtimes if installed(runtime)
        }
        if not any(map(installed, RUNTIMES)):
            raise PlanError(
                f"model {name}: the decoder needs PyTorch or JAX, and neither is installed: "
                f"{install_advice('torch')}"
            )
    elif is_config(name):
        models = _of_config(name, stacked, attention)
    elif colon:
        _check_own_attention(name, attention)
        models = _built(name, stacked)
    else:
        raise PlanError(
            f"model: expected decoder:CONFIG, a path of a config.json, package.module:Factory or one of "
            f"{', '.join(SHIPPED)}, got {name!r}{did_you_mean(name, SHIPPED)}"
        )
    chosen = {runtime: models[runtime] for runtime in runtimes if runtime in models}
    if not chosen:
        raise PlanError(
            f"model {name}: expected a model of {' or '.join(runtimes)}, got one of {', '.join(models)}"
        )
    return chosen


def _stacked_shape(model: Model, stacked: Sequence[str]) -> Model:
    for path in stacked:
        if f"{path}.0" not in model.modules:
            raise PlanError(f"model {model.name}: expected a stack with layers, got {path!r}")
    return replace(model, stacks=tuple(stacked))


def _decoder(runtime: str, name: str, config: ModelConfig, stacked: Sequence[str]) -> Model:
    models = part(runtime, "models")
    sizes = models.DecoderConfig(**asdict(config))
    if runtime == "torch":
        with framework("torch").device("meta"):
            parameters, modules = _torch_shapes(models.Decoder(sizes))
        stacked = ()
    else:
        parameters, modules = _language_shapes(name, stacked)
    activations = decoder_activations(runtime, sizes)
    return Model(name, modules, parameters, activations, f"the decoder of {runtime}_impl", tuple(stacked))


def _check_own_attention(name: str, asked: Attention | None, runs: Attention | None = None) -> None:
    if asked not in (None, runs):
        raise PlanError(
            f"model {name}: expected no --attention {asked}, since its activations come from its own code"
            + (f", which runs {runs} attention" if runs else "")
        )


def _of_config(name: str, stacked: Sequence[str], attention: Attention | None) -> dict[str, Model]:
    config = causal_lm_config(name)
    parameters, modules = _language_shapes(name, stacked)
    shape = shape_of(config)
    if attention is Attention.fused:
        if shape is None:
            raise PlanError(
                f"model {name}: expected no --attention fused, which is counted only for Llama and Mixtral"
            )
        activations = tuple(shape.jax_activations(attention))
    else:
        activations = decoder_activations("jax", config)
    source, chosen = "jax_impl.models.CausalLM", attention or Attention.plain
    models = {"jax": Model(name, modules, parameters, activations, source, tuple(stacked), chosen.value)}
    # For other families, the layers of Hugging Face are not counted.
    return models if shape is None else {"torch": shape_model(name, shape, "torch", attention), **models}


def _language_shapes(name: str, stacked: Sequence[str]) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    if tuple(stacked) not in ((), ("layers",)):
        raise PlanError(f"model {name}: expected the stack 'layers' or none, got {list(stacked)}")
    return nnx_shapes(name, abstract_model(name, bool(stacked)), stacked)


def _built(name: str, stacked: Sequence[str]) -> dict[str, Model]:
    """A model from a factory, on PyTorch's meta device or by ``nnx.eval_shape``."""
    factory = Factory.named(name)
    if factory.is_jax:
        model = factory.jax_module()
        parameters, modules = nnx_shapes(name, model, stacked)
        nnx, leaves = framework("flax.nnx"), framework("jax").tree.leaves
        other = [leaf for leaf in leaves(nnx.state(model, nnx.Not(nnx.Param))) if hasattr(leaf, "dtype")]
        held, by = sum(leaf.size * leaf.dtype.itemsize for leaf in other), f"{name} by nnx.eval_shape"
        return {"jax": Model(name, modules, parameters, source=by, stacks=tuple(stacked), buffers=held)}
    model = factory.torch_module()
    if stacked:
        raise PlanError(
            f"model {name}: expected a JAX model for the stacks {list(stacked)}, got a torch.nn.Module"
        )
    parameters, modules = _torch_shapes(model)
    held, by = sum(buffer.nbytes for buffer in model.buffers()), f"{name} on the meta device"
    return {"torch": Model(name, modules, parameters, source=by, buffers=held)}


def _torch_shapes(model: Any) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters by their first name, in definition order, and the modules that have a forward."""
    nn = framework("torch.nn")
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    kinds = {
        f"{path}.{name}".lstrip("."): _torch_kind(nn, module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    parameters = tuple(
        Parameter(path, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, kinds[path])
        for path, p in model.named_parameters()
    )
    return parameters, tuple(
        path for path, module in model.named_modules() if not isinstance(module, containers)
    )


def _torch_kind(nn: Any, module: Any, name: str) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "bias" if name == "bias" else "linear"
    return "other"


def nnx_shapes(
    name: str, model: Any, stacked: Sequence[str]
) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters in the order of the model's state, which is sorted, and the modules that may be units.

    Parameters of a stack are returned layer by layer.
    """
    nnx = framework("flax.nnx")
    paths = [path.replace(".", "/") for path in stacked]
    try:
        lengths = part("jax", "modules.stack").stack_lengths(model, paths)
    except ValueError as error:
        raise PlanError(f"model {name}: {error}") from error
    stacks = {path.replace("/", "."): length for path, length in lengths.items()}
    convolutions = {
        (*path, "kernel")
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Conv | nnx.ConvTranspose)
    }
    parameters: list[Parameter] = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array, kind = variable.get_raw_value(), "convolution" if path in convolutions else ""
        parameters.append(Parameter(_dotted(path), tuple(array.shape), str(array.dtype), kind=kind))
    modules = list(_nnx_modules(model))
    for stack, length in stacks.items():
        inside = [parameter for parameter in parameters if parameter.path.startswith(f"{stack}.")]
        layers = [
            replace(parameter, path=_in_layer(parameter.path, stack, number), shape=parameter.shape[1:])
            for number in range(length)
            for parameter in inside
        ]
        start = parameters.index(inside[0])
        parameters[start : start + len(inside)] = layers
        below = [path for path in modules if path == stack or path.startswith(f"{stack}.")]
        start = modules.index(below[0])
        modules[start : start + len(below)] = [
            _in_layer(path, stack, number) for number in range(length) for path in below
        ]
    return tuple(parameters), tuple(modules)


def _in_layer(path: str, stack: str, number: int) -> str:
    return f"{stack}.{number}{path[len(stack) :]}"


def _nnx_modules(model: Any) -> Iterator[str]:
    nnx, tree_model = framework("flax.nnx"), part("jax", "modules.tree_model")
    units = [(path, module) for path, module in nnx.iter_modules(model) if tree_model.may_be_unit(module)]
    units.sort(key=lambda unit: [(isinstance(part, str), part) for part in unit[0]])
    yield from (_dotted(path) for path, _ in units)


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
