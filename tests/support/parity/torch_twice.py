"""A torch model that stands for a JAX model, so that a comparison takes a tenth of the time: nothing is compiled.

Its parameters and modules have names as in JAX, and matrices are stored as ``[in, out]``. Only the framework's own code
(`bridge/parity/jax`) is not reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bridge.core.mapping import MappingTable, parse_mapping
from bridge.parity.recorded.recording import Call, Leaves, Recording, Replacements, Rerun, Training
from bridge.parity.torch.side import TorchSide


def identity(model: torch.nn.Module) -> MappingTable:
    """The mapping from a model to the same model as a `RenamedSide`."""
    rules = ['name = "twice"']
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        axes = (" : o i", " : i o") if tensor.ndim == 2 else ("", "")
        rules.append(f'[[rule]]\ntorch = "{name}{axes[0]}"\njax = "{_jax_name(name)}{axes[1]}"')
    return parse_mapping("\n".join(rules), "twice")


def _jax_name(name: str) -> str:
    return name.replace(".", "/").replace("/weight", "/kernel")


def _torch_name(name: str) -> str:
    return name.replace("/kernel", "/weight").replace("/", ".")


def _renamed(leaves: Leaves) -> dict[str, np.ndarray]:
    return {_jax_name(name): leaf.T if leaf.ndim == 2 else leaf for name, leaf in leaves.items()}


def _own(leaves: Leaves) -> dict[str, np.ndarray]:
    return {_torch_name(name): leaf.T if leaf.ndim == 2 else leaf for name, leaf in leaves.items()}


def _call(call: Call) -> Call:
    return dataclasses.replace(call, path=call.path.replace(".", "/"))


class RenamedSide(TorchSide):
    """See the module's docstring, and `TorchSide`."""

    framework = "jax"
    separator = "/"

    def weights(self) -> dict[str, np.ndarray]:
        return _renamed(super().weights())

    def buffers(self) -> dict[str, np.ndarray]:
        return _renamed(super().buffers())

    def load(self, weights: Leaves) -> None:
        super().load(_own(weights))

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        made = super().record(batch, dtype, backward=backward)
        calls = [_call(call) for call in made.calls]
        return Recording(dtype, calls, made.loss, _renamed(made.gradients), _renamed(made.buffers))

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        made = super().in_order(batch, rows, dtype)
        return dataclasses.replace(made, gradients=_renamed(made.gradients))

    def rerun(
        self,
        dtype: str,
        path: str,
        number: int,
        inputs: Leaves,
        *,
        cotangents: Leaves | None = None,
        replaced: Replacements | None = None,
    ) -> Rerun:
        own = {(name.replace("/", "."), count): leaves for (name, count), leaves in (replaced or {}).items()}
        path = path.replace("/", ".")
        made = super().rerun(dtype, path, number, inputs, cotangents=cotangents, replaced=own)
        calls = [_call(call) for call in made.calls]
        return Rerun(made.outputs, calls, made.input_gradients, _renamed(made.gradients))

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        made = super().train(batches, dtype)
        between = tuple(_renamed(leaves) for leaves in made.between)
        return Training(made.losses, _renamed(made.first), _renamed(made.last), between)
