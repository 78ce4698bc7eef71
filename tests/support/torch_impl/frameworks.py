"""Public programs that call FSDP2 themselves, run with torch's ``fully_shard`` and with ours.

A program is a function of a folder. ``run`` calls it with the current meaning of the names of
``torch.distributed.fsdp``. The extra ``programs`` installs the packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import torch_impl

LIBRARIES = ("torch", "torch_impl")


def needs(*packages: str, advice: str = "pip install '.[programs]'") -> pytest.MarkDecorator:
    """Skip a test if one of the packages is not installed."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed: {advice}")


def run(library: str, program: Callable[..., Any], *args: Any, fresh: tuple[str, ...] = ()) -> Any:
    """``program(*args)`` with FSDP2 of ``library``, one of ``LIBRARIES``.

    fresh: packages that bind FSDP2's names at import, so the function imports them again.
    """
    with nullcontext() if library == "torch" else _installed():
        _forget(fresh)
        try:
            return program(*args)
        finally:
            _forget(fresh)


def both(program: Callable[..., Any], folder: str, fresh: tuple[str, ...] = ()) -> list[Any]:
    """What ``program(folder)`` returns with each library, with a folder of its own for each."""
    return [run(library, program, str(Path(folder) / library), fresh=fresh) for library in LIBRARIES]


@contextmanager
def _installed() -> Iterator[None]:
    with warnings.catch_warnings():
        # Modules that an earlier program imported.
        warnings.filterwarnings("ignore", "torch_impl.install", UserWarning)
        installation = torch_impl.install()
    with installation:
        yield


def _forget(packages: tuple[str, ...]) -> None:
    for path in list(sys.modules):
        if path.partition(".")[0] in packages:
            del sys.modules[path]


def assert_sharded(model: nn.Module) -> None:
    """Assert that the right library is installed, because a test must not compare torch with torch."""
    module_class = importlib.import_module("torch.distributed.fsdp").FSDPModule
    assert isinstance(model, module_class)
    ours = module_class is torch_impl.FSDPModule
    assert isinstance(model, torch_impl.FSDPModule) == ours
    assert all(isinstance(param, DTensor) for param in model.parameters())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered, by their names without wrappers. Collective."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): torch_impl.full_tensor(
            param
        )
        .detach()
        .clone()
        for name, param in model.named_parameters()
    }


class Result(NamedTuple):
    """Results of a run: losses of all microbatches on this rank, norms of gradients, whole weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def assert_equal_runs(runs: list[list[Result]], learned: float, rounding: float = 1e-6) -> None:
    """``runs``: by rank, what ``both`` returns. ``learned``: by how much the loss falls at least.

    ``rounding``: the largest relative difference of losses.
    """
    for stock, ours in runs:
        assert ours.losses == pytest.approx(stock.losses, rel=rounding)
        assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
        assert ours.weights.keys() == stock.weights.keys()
        for name, weight in stock.weights.items():
            torch.testing.assert_close(
                ours.weights[name],
                weight,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        assert stock.losses[0] - min(stock.losses) > learned, "nothing was learned"
    assert runs[0][0].losses[0] != runs[1][0].losses[0], "expected different data on the ranks"


@contextmanager
def accelerate_on_cpus() -> Iterator[ModuleType]:
    """Let accelerate, which has FSDP on accelerators only, use gloo and CPU in place of nccl and CUDA."""
    import accelerate
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    environment = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(PartialState, "_prepare_backend", backend),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield accelerate
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def llama(seed: int, tied: bool = False, **options: Any) -> nn.Module:
    """A small Llama of transformers. No number of ranks divides its rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=41,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="eager",
        initializer_range=0.2,
        **options,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def tokens(step: int, rows: int = 2, length: int = 10) -> torch.Tensor:
    """This rank's tokens of a step, ``[rows, length]``: few and different on each rank, so they are learned."""
    generator = torch.Generator().manual_seed(1000 * (step % 2) + dist.get_rank())
    return torch.randint(0, 67, (rows, length), generator=generator)
