"""Run random programs sharded, and as a reference on plain replicas whose gradients are averaged."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import torch_impl
from tests.support.torch_impl.late_transfers import late_collectives, late_lanes
from tests.support.torch_impl.random_programs import (
    SYNC,
    WORDS,
    Net,
    Program,
    RaisesInBackward,
    Route,
    Stop,
    draw,
)
from tests.support.torch_impl.toy import assert_same_weights

_TRANSFERS: dict[str, Callable[[], Any]] = {
    "as they come": nullcontext,
    "late collectives": late_collectives,
    "late lanes": late_lanes,
}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    # Moments of elements without gradients are noise and must not be divided by each other.
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}


def net(seed: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().double()


class Player:
    """Runs a program's operations on one model, sharded or a plain replica.

    ``norm``: what clipping returned last. ``present``: for the replica, names of parameters that have gradients in the
    sharded model, where missing gradients of a group count as zeros.
    """

    def __init__(self, program: Program, sharded: bool) -> None:
        self._sharded = sharded
        self.model = net(3)
        self.present: set[str] = set()
        self.norm: torch.Tensor | None = None
        if sharded:
            self._shard(program)
        self._optimizer = _OPTIMIZERS[program.optimizer](self.model.parameters())
        self._remembered: tuple[Any, Any] | None = None
        self._random = torch.Generator().manual_seed(100 + dist.get_rank())

    def _shard(self, program: Program) -> None:
        modules: dict[str, Any] = dict(self.model.named_modules())
        mesh, strategy = None, program.strategy
        if dist.get_world_size() == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
            strategy = program.on_two_axes
        for unit in program.units:
            torch_impl.fully_shard(
                modules[unit],
                mesh=mesh,
                strategy=strategy,
                reshard_after_forward=program.reshard_after_forward,
                prefetch=program.ahead,
                offload_policy=CPUOffloadPolicy() if program.offload else None,
            )
        self.model.set_buffer_pool(program.pool)
        for unit, direction, others in program.prefetch:
            set_list = getattr(modules[unit], f"set_modules_to_{direction}_prefetch")
            set_list([modules[other] for other in others])

    def _loss(self, route: Route, between: Callable[[int, Any], Any] = lambda index, x: x) -> torch.Tensor:
        tokens = torch.randint(0, WORDS, (3,), generator=self._random)
        return nn.functional.cross_entropy(self.model(tokens, route, between), tokens)

    # Forwards and backwards.

    def sync(self, which: str) -> None:
        if self._sharded:
            synced, last, reduced = SYNC[which]
            self.model.set_requires_gradient_sync(synced)
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(reduced)

    def train(self, route: Route) -> None:
        self._loss(route).backward()

    def two(self, first: Route, second: Route) -> None:
        """One backward of two forwards."""
        (self._loss(first) + self._loss(second)).backward()

    def two_apart(self, first: Route, second: Route) -> None:
        for loss in [self._loss(first), self._loss(second)]:
            loss.backward()

    def two_in_reverse(self, first: Route, second: Route) -> None:
        for loss in reversed([self._loss(first), self._loss(second)]):
            loss.backward()

    def twice(self, route: Route) -> None:
        """Two backwards of one forward."""
        loss = self._loss(route)
        loss.backward(retain_graph=True)
        loss.backward()

    def evaluate(self, route: Route) -> None:
        with torch.no_grad():
            self._loss(route)

    def infer(self, route: Route) -> None:
        with torch.inference_mode():
            self._loss(route)

    def forward_raises(self, route: Route) -> None:
        def stop(index: int, x: torch.Tensor) -> torch.Tensor:
            if index == len(route) - 1:
                raise Stop
            return x

        with pytest.raises(Stop):
            self._loss(route, stop)

    def backward_raises(self, route: Route) -> None:
        def stop(index: int, x: torch.Tensor) -> torch.Tensor:
            return RaisesInBackward.apply(x) if index == len(route) // 2 else x

        with pytest.raises(Stop):
            self._loss(route, stop).backward()
        self._optimizer.zero_grad()

    # Steps.

    def clip(self, limit: float) -> None:
        self._average()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, cleared: str) -> None:
        self._average()
        self._optimizer.step()
        if cleared == "of the model":
            self.model.zero_grad()
        elif cleared != "kept":
            self._optimizer.zero_grad(set_to_none=cleared == "to none")

    def skip_step(self) -> None:
        self._optimizer.zero_grad()

    def _average(self) -> None:
        """Leave gradients unchanged that are averages already."""
        if not self._sharded:
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
                elif name in self.present:
                    param.grad = torch.zeros_like(param)

    # Weights and options.

    def freeze(self, block: int, frozen: bool) -> None:
        self.model.blocks[block].requires_grad_(not frozen)

    def write(self, number: int, how: str) -> None:
        params = list(self.model.parameters())
        param = params[number % len(params)]
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_mul_(params, 0.97)
            elif how == "copy":
                param.copy_(param * 0.9)
            else:
                param.mul_(1.1)

    def load(self, seed: int) -> None:
        state = net(seed).state_dict()
        if self._sharded:
            set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))
        else:
            self.model.load_state_dict(state)

    def remember(self) -> None:
        self._remembered = copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict()))

    def recall(self) -> None:
        if self._remembered is not None:
            weights, state = copy.deepcopy(self._remembered)
            self.model.load_state_dict(weights)
            self._optimizer.load_state_dict(state)

    def save_and_load(self) -> None:
        """Save to disk, change the weights, and load."""
        # Missing momenta cannot be saved. Plain SGD has none, and AdamW's are created first.
        partial = self._optimizer.defaults.get("momentum") and len(self._optimizer.state) < len(
            [*self.model.parameters()]
        )
        if not self._sharded or partial:
            return
        with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            path = os.path.join(str(folders[0]), "saved")
            torch_impl.save_checkpoint(path, self.model, self._optimizer)
            self.write(0, "foreach")
            torch_impl.load_checkpoint(path, self.model, self._optimizer)
            dist.barrier()

    def unshard(self, unit: str, asynchronously: bool) -> None:
        if self._sharded:
            module: Any = self.model.get_submodule(unit)
            handle = module.unshard(async_op=asynchronously)
            if handle is not None:
                handle.wait()
            module.reshard()

    def reshard_after_forward(self, reshard: bool) -> None:
        if self._sharded:
            self.model.set_reshard_after_forward(reshard)

    def training(self, training: bool) -> None:
        self.model.train(training)


def compare(seeds: range) -> None:
    """Play the programs of some seeds on both models; all weights must be the same after each step."""
    for seed in seeds:
        program = draw(seed)
        try:
            with _TRANSFERS[program.transfers]():
                _compare_steps(program)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program}") from error


def _compare_steps(program: Program) -> None:
    sharded, plain = Player(program, True), Player(program, False)
    for name, *arguments in program.ops:
        if name in ("step", "clip"):
            params = sharded.model.named_parameters()
            plain.present = {of for of, param in params if param.grad is not None}
        for player in (sharded, plain):
            getattr(player, name)(*arguments)
        if name in ("step", "recall", "save_and_load", "load"):
            assert_same_weights(sharded.model, plain.model, rtol=1e-9, atol=1e-12)
        if name == "clip":
            torch.testing.assert_close(sharded.norm, plain.norm, rtol=1e-9, atol=1e-12)
