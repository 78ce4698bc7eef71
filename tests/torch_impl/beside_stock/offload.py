"""What PyTorch's FSDP2 tests ask of CPUOffloadPolicy, all over their files: on the CPU, where both engines run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    gradients_are,
    rows,
    squares,
    train_as_one,
    weights_are,
    whole,
)
from tests.support.torch_impl.zoo import MLP, Stack


def offloaded(engine: Engine, model: Any, **options: Any) -> Any:
    """With the engine's own policy, which is torch's in both."""
    assert engine.package.CPUOffloadPolicy is CPUOffloadPolicy
    return engine.shard_all(
        *model.blocks, model, offload_policy=CPUOffloadPolicy(pin_memory=False), **options
    )


def where(engine: Engine) -> list[str]:
    """Parameters, gradients and moments lie in CPU memory."""
    model = offloaded(engine, Stack())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    squares(model, rows(0)).backward()
    optimizer.step()
    devices = []
    for param in model.parameters():
        moment = optimizer.state[param]["exp_avg"]
        devices += [tensor.to_local().device.type for tensor in (param.detach(), param.grad, moment)]
    assert set(devices) == {"cpu"}
    return devices


def clipped(engine: Engine) -> list[float]:
    """Norms of offloaded gradients, clipped in three steps with microbatches."""
    model = Stack()
    reference = copy.deepcopy(model)
    offloaded(engine, model)
    updates = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (model, reference)]
    norms = []
    for step in range(3):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            squares(model, rows(2 * step + part)).backward()
            backward_as_one(reference, 2 * step + part)
        wanted, norm = (
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (reference, model)
        )
        torch.testing.assert_close(whole(norm), wanted)
        gradients_are(model, reference)
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(model, reference)
        norms.append(wanted.item())
    return norms


def low_precision(engine: Engine) -> list[float]:
    """Weights are cast on the way: losses of the same policy without offload, bit for bit."""
    policy = engine.package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    source = Stack()
    losses: list[list[float]] = []
    for offload in (True, False):
        model = copy.deepcopy(source)
        options: dict[str, Any] = {"mp_policy": policy}
        if offload:
            offloaded(engine, model, **options)
        else:
            engine.shard_all(*model.blocks, model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(3):
            loss = squares(model, rows(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    return losses[0]


def reference_model(engine: Engine) -> list[float]:
    """A model that is only run, as verl's reference models are, loaded from the first rank's values."""
    source = Stack(2)
    with torch.device("meta"):
        model = offloaded(engine, Stack(2))
    set_model_state_dict(
        model,
        source.state_dict() if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True),
    )
    model.eval()
    with torch.no_grad():
        losses = [squares(model, rows(step)) for step in range(2)]
    for step, loss in enumerate(losses):
        torch.testing.assert_close(loss, squares(source, rows(step)))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(state) == (dist.get_rank() == 0)
    return [loss.item() for loss in losses]


def frozen_part(engine: Engine) -> list[float]:
    """Frozen and trained parameters of one unit, offloaded together."""
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    return train_as_one(
        model,
        lambda module: offloaded(engine, module),
        optimizer=lambda params: torch.optim.Adam(
            [param for param in params if param.requires_grad], lr=1e-2
        ),
    )


def no_policy(engine: Engine) -> bool:
    """``OffloadPolicy()`` is no offload; anything else is no policy here."""
    train_as_one(
        MLP(), lambda module: engine.shard(module, offload_policy=engine.package.OffloadPolicy()), steps=1
    )
    with engine.refused(TypeError, "offload_policy"):
        engine.shard(MLP(), offload_policy="cpu")
    return True


PROGRAMS = [
    Program(where),
    Program(clipped, slow=True),
    Program(low_precision, slow=True),
    Program(reference_model),
    Program(frozen_part, slow=True),
    Program(no_policy),
]
