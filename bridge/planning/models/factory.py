"""Users' models and functions by path, ``package.module:name``: importing them, and models from shapes alone."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bridge.planning.models.errors import PlanError
from bridge.planning.models.runtimes import abstract_module, framework, installed, part


def function_named(what: str, path: str, example: str) -> Callable[..., Any]:
    """``package.module:name``, searched from the current folder on. Raises ``PlanError`` if it cannot be imported.

    what: the noun in an error, such as "loss". example: how the path should look.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for attribute in name.split("."):
            target = getattr(target, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"{what} {path}: expected {example} that can be imported: {error}") from error
    if not callable(target):
        raise PlanError(f"{what} {path}: expected a class or function, got {type(target).__name__}")
    return target


@dataclass(frozen=True)
class Factory:
    """A class or function that makes a model. ``wanted``: which of ``rngs`` and ``key`` it takes."""

    name: str
    make: Callable[..., Any]
    wanted: tuple[str, ...]

    @staticmethod
    def named(name: str) -> Factory:
        """Raises ``PlanError`` if the path does not lead to a class or function."""
        factory = function_named("model", name, "package.module:Factory")
        called: Any = factory
        if isinstance(factory, type):
            # The metaclass of nnx hides the constructor's signature.
            called = next(vars(base)["__init__"] for base in factory.__mro__ if "__init__" in vars(base))
        taken = inspect.signature(called).parameters
        return Factory(name, factory, tuple(name for name in ("rngs", "key") if name in taken))

    @property
    def is_jax(self) -> bool:
        return bool(self.wanted) or (
            isinstance(self.make, type)
            and any(base.__module__.startswith("flax.nnx") for base in self.make.__mro__)
        )

    def jax_module(self) -> Any:
        """An abstract nnx module, or one that represents a pytree of parameters. Raises ``PlanError`` for others."""
        if not installed("jax"):
            raise PlanError(f"model {self.name}: expected jax and flax to be installed for a JAX model")
        jax, tree_model = framework("jax"), part("jax", "modules.tree_model")

        def make(rngs: Any) -> Any:
            arguments = {"rngs": rngs} if "rngs" in self.wanted else {}
            arguments |= {"key": jax.random.key(0)} if self.wanted == ("key",) else {}
            return tree_model.as_module(self.make(**arguments))

        try:
            return abstract_module(make)
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"model {self.name}: expected a factory of an nnx.Module or a pytree of parameters: {error}"
            ) from error
        except Exception as error:
            # A user's code may raise anything.
            raise PlanError(f"model {self.name}: {type(error).__name__}: {error}") from error

    def torch_module(self) -> Any:
        """A ``torch.nn.Module`` on the meta device. Raises ``PlanError`` for others."""
        if not installed("torch"):
            raise PlanError(
                f"model {self.name}: expected a factory of a JAX model that takes rngs or key, or torch to be installed"
            )
        torch = framework("torch")
        try:
            with torch.device("meta"):
                model = self.make()
        except Exception as error:
            raise PlanError(f"model {self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise PlanError(
                f"model {self.name}: expected a torch.nn.Module, or a factory that takes rngs (an nnx.Module) or key "
                "(a pytree of parameters; of a linen module, which needs an example input: return "
                f'net.init(key, example)["params"]), got {type(model).__name__}'
            )
        lazy = [
            n for n, p in model.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)
        ]
        if lazy:
            raise PlanError(
                f"model {self.name}: expected parameters of known shapes, got {lazy[0]}, whose shape is known only "
                "after the first call: have the factory call the model once on an example"
            )
        return model
