"""From what a user names to models: ``llama3-8b``, ``decoder:CONFIG`` or ``package.module:Factory``.

The two runtimes may hold one model in different shapes (PyTorch ``[out, in]`` and fused, JAX ``[in, out]`` and by
head), which are laid out and padded differently. So a name resolves to one ``Model`` for each runtime that could run
it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.parity.config import BUILT_IN, ConfigError, ModelConfig
from bridge.planning.decoder_activations import decoder_activations
from bridge.planning.errors import PlanError
from bridge.planning.model import Model, Parameter
from bridge.planning.runtimes import RUNTIMES, any_runtime, framework, installed, part
from bridge.planning.shipped_models import SHIPPED, shipped_model


def resolve_models(name: str, runtimes: Sequence[str] = RUNTIMES) -> dict[str, Model]:
    """``{runtime: model}`` for those of ``runtimes`` that can run it. Raises ``PlanError`` when none can."""
    kind, colon, rest = name.partition(":")
    if name in SHIPPED:
        shape = shipped_model(name)
        models = dict.fromkeys(RUNTIMES, shape)
    elif kind == "decoder" and colon:
        config = decoder_config(rest)
        any_runtime()
        models = {one: _decoder(one, name, config) for one in runtimes if installed(one)}
    elif colon:
        models = _built(name, kind, rest)
    else:
        raise PlanError(
            f"model: expected decoder:CONFIG, package.module:Factory or one of {', '.join(SHIPPED)}, got {name!r}"
        )
    found = {one: models[one] for one in runtimes if one in models}
    if not found:
        raise PlanError(
            f"model {name}: expected a model of {' or '.join(runtimes)}, got one of {', '.join(models)}"
        )
    return found


def decoder_config(name_or_path: str) -> ModelConfig:
    """The ``[model]`` table of a relay file, or of any TOML file. Raises ``PlanError`` where there is none."""
    built_in = BUILT_IN / f"{name_or_path}.toml"
    path = built_in if built_in.is_file() else Path(name_or_path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(sorted(p.stem for p in BUILT_IN.glob("*.toml")))
        raise PlanError(
            f"decoder {path}: expected a TOML file or one of {names}: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"decoder {path}: not a TOML file: {error}") from error
    model = table.get("model")
    if not isinstance(model, Mapping):
        raise PlanError(f"decoder {path}: expected a table [model], got {model!r}")
    try:
        return ModelConfig(**model)
    except (TypeError, ConfigError) as error:
        raise PlanError(f"decoder {path}: {error}") from error


def _decoder(runtime: str, name: str, config: ModelConfig) -> Model:
    models = part(runtime, "models")
    sizes = models.DecoderConfig(**asdict(config))
    if runtime == "torch":
        with framework("torch").device("meta"):
            parameters, modules = _torch_shapes(models.Decoder(sizes))
    else:
        nnx = framework("flax.nnx")
        parameters, modules = _nnx_shapes(nnx.eval_shape(lambda: models.Decoder(sizes, rngs=nnx.Rngs(0))))
    return Model(
        name, modules, parameters, decoder_activations(runtime, sizes), f"the decoder of {runtime}_impl"
    )


def _built(name: str, module_name: str, factory_name: str) -> dict[str, Model]:
    """A model that a program makes, on PyTorch's meta device or by ``nnx.eval_shape``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
        for attribute in factory_name.split("."):
            factory = getattr(factory, attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"model {name}: expected package.module:Factory that can be imported: {error}"
        ) from error
    if not callable(factory):
        raise PlanError(f"model {name}: expected a class or function, got {type(factory).__name__}")
    called = factory
    if isinstance(factory, type):
        # The metaclass of nnx hides the constructor's signature.
        called = next(vars(one)["__init__"] for one in factory.__mro__ if "__init__" in vars(one))
    wants_rngs = "rngs" in inspect.signature(called).parameters
    if wants_rngs or _is_nnx_class(factory):
        return {"jax": _nnx_model(name, factory, wants_rngs)}
    if not installed("torch"):
        raise PlanError(f"model {name}: expected a flax.nnx module that takes rngs, or torch to be installed")
    torch = framework("torch")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, torch.nn.Module):
        raise PlanError(
            f"model {name}: expected a torch.nn.Module, or a factory of an nnx.Module that takes rngs, got "
            f"{type(model).__name__}"
        )
    parameters, modules = _torch_shapes(model)
    return {"torch": Model(name, modules, parameters, source=f"{name} on the meta device")}


def _nnx_model(name: str, factory: Any, wants_rngs: bool) -> Model:
    if not installed("jax"):
        raise PlanError(f"model {name}: expected jax and flax to be installed for a flax.nnx module")
    nnx = framework("flax.nnx")
    try:
        model = nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0)) if wants_rngs else factory())
    except TypeError as error:
        raise PlanError(f"model {name}: expected a factory of an nnx.Module: {error}") from error
    if not isinstance(model, nnx.Module):
        raise PlanError(f"model {name}: expected an nnx.Module, got {type(model).__name__}")
    parameters, modules = _nnx_shapes(model)
    return Model(name, modules, parameters, source=f"{name} by nnx.eval_shape")


def _is_nnx_class(factory: Any) -> bool:
    return isinstance(factory, type) and any(one.__module__.startswith("flax.nnx") for one in factory.__mro__)


def _torch_shapes(model: Any) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters by their first name, in definition order, and the modules that have a forward."""
    nn = framework("torch.nn")
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    parameters = tuple(
        Parameter(path, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for path, p in model.named_parameters()
    )
    return parameters, tuple(
        path for path, module in model.named_modules() if not isinstance(module, containers)
    )


def _nnx_shapes(model: Any) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters in the order of the model's state, which is sorted, and the modules that can be called."""
    nnx = framework("flax.nnx")
    parameters = tuple(
        Parameter(_dotted(path), tuple(variable.get_raw_value().shape), str(variable.get_raw_value().dtype))
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    )
    return parameters, tuple(_nnx_modules(model))


def _nnx_modules(model: Any) -> Iterator[str]:
    nnx = framework("flax.nnx")
    found = [(path, module) for path, module in nnx.iter_modules(model) if callable(module)]
    yield from (_dotted(path) for path, _ in sorted(found, key=lambda one: _order(one[0])))


def _order(path: Sequence[Any]) -> list[tuple[bool, Any]]:
    return [(isinstance(part, str), part) for part in path]


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
