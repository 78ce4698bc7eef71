"""Items 1 to 5: what was wrong here, mostly in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from tests.support.torch_impl.comparison import Design, Facts, Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    counting,
    rows,
    squares,
    trained,
    weights_are,
    whole,
)
from tests.support.torch_impl.extended import Bytes, Halved, Rounded
from tests.support.torch_impl.zoo import Stack


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))


def divided_by_one(model: nn.Sequential) -> None:
    for module in (*model, model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no PREMUL_SUM, which FSDP2 otherwise takes.
        module.set_force_sum_reduction_for_comms(True)


SETTERS: dict[str, Callable[[Any], object]] = {
    "no setter": lambda model: None,
    "set_gradient_divide_factor(1.0)": divided_by_one,
    "set_requires_gradient_sync(False)": lambda model: model.set_requires_gradient_sync(False),
    "set_reshard_after_forward(False)": lambda model: model.set_reshard_after_forward(False),
    "set_reshard_after_backward(False)": lambda model: model.set_reshard_after_backward(False),
}
MOMENTS = ("on the meta device", "after to_empty", "between microbatches")


def setters(engine: Engine) -> Facts:
    """Shard on the meta device, to_empty, load, two microbatches, the second one reduced; a setter is called at one
    of these moments. Noted: the first element's gradient (of one process: without a setter), and how many gathers and
    reductions there were.
    """
    facts = Facts()
    source = blocks()
    once = blocks()
    once.load_state_dict(source.state_dict())
    for microbatch in range(2):
        backward_as_one(once, microbatch)
    facts("one process", once[0][0].weight.grad[0, 0])
    for name, call in SETTERS.items():
        for moment in MOMENTS:
            with torch.device("meta"):
                model = blocks()
            engine.shard_all(*model, model)
            if moment == MOMENTS[0]:
                call(model)
            model.to_empty(device="cpu")
            set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
            if moment == MOMENTS[1]:
                call(model)
            gathers = reductions = 0
            for microbatch in range(2):
                if microbatch and moment == MOMENTS[2]:
                    call(model)
                with counting(engine, model) as calls:
                    squares(model, rows(microbatch)).backward()
                gathers, reductions = gathers + calls["all_gather"], reductions + calls["reduce_scatter"]
            if "sync" in name:
                facts(f"{name} {moment}", [gathers, reductions])
                continue
            if "backward" in name:
                plain = not isinstance(model[0][0].weight, DTensor)
                facts(f"plain weights after the backward, set {moment}", plain)
                for module in (*model, model):
                    module.reshard()
            facts(f"{name} {moment}", [whole(model[0][0].weight.grad)[0, 0].item(), gathers, reductions])
    return facts


def loaded_on_meta(engine: Engine) -> Facts:
    """Shard on the meta device, set_model_state_dict(full_state_dict=True), forward; no to_empty, as torchtune."""
    facts = Facts()
    source = Stack()
    for broadcast in (False, True):
        with torch.device("meta"):
            model: Any = Stack()
        engine.shard_all(*model.blocks, model)
        state = source.state_dict() if not broadcast or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, state, options=options)
        how = f"broadcast_from_rank0={broadcast}"
        facts(f"{how}: where", sorted({param.device.type for param in model.parameters()}))
        facts(f"{how}: a forward", lambda model=model: model(rows(0)).sum())
        facts(f"{how}: in one process", source(rows(0)).sum())
        weights_are(model, source)
        torch.testing.assert_close(model(rows(0)), source(rows(0)))
    return facts


class Adapted(nn.Module):
    """A frozen base of int8 rows with scales, and adapters, as of QLoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(Bytes.of(torch.randn(8, 8)), requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Both payloads are there in forward.
        return nn.functional.linear(x, self.base.dequantize()) + self.up(self.down(x))


def extensions(engine: Engine) -> Facts:
    """Parameters of wrapper classes with fsdp_pre_all_gather: float32 gathered as bfloat16, and a frozen base of two
    payloads under adapters. Two steps of SGD.
    """
    facts = Facts()
    Halved.calls.clear()
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(Rounded(model[0].weight.detach()))
    engine.shard(model)
    for label, module in (("bfloat16", model), ("int8 base", engine.shard(Adapted()))):
        optimizer = torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.01)
        facts(f"{label}: losses", trained(module, optimizer, 0, 1))
        first = next(module.parameters())
        facts(f"{label}: class of a rank's rows", type(first.to_local()).__name__)
    facts("bfloat16: calls of fsdp_pre_all_gather", Halved.calls["pre"])
    facts("bfloat16: calls of fsdp_post_all_gather", Halved.calls["post"] + Halved.calls["post again"])
    return facts


def refused_early(engine: Engine) -> Facts:
    """load_state_dict(assign=True) of plain tensors, and the forward after it; param_dtype=float8; granularity="block"
    of two rows on a stack (3, 3, 4): how many rows of it this rank has.
    """
    facts = Facts()
    model = engine.shard(nn.Linear(8, 4))
    state = nn.Linear(8, 4).state_dict()
    facts("assign=True of plain tensors", lambda: str(model.load_state_dict(state, assign=True)))
    facts("the forward after it", lambda: tuple(model(rows(0)).shape))

    def float8() -> str:
        policy = engine.package.MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)
        return str(engine.shard(nn.Linear(8, 4), mp_policy=policy)(rows(0)).dtype)

    facts("MixedPrecisionPolicy(param_dtype=float8)", float8)

    def of_blocks() -> str:
        stack = nn.ParameterList([torch.randn(3, 3, 4)])
        holder = nn.Module()
        holder.stack = stack[0]
        sharded = engine.shard(holder, granularity="block", rows=2)
        # Blocks of a matrix of three rows are two rows and one.
        rest = sharded.stack.to_local().shape[0] % 3
        return "no block is cut" if rest in (0, 2) else f"cut after {rest} row of a matrix"

    facts('granularity="block"', of_blocks)
    return facts


PROGRAMS = [
    Program(
        setters,
        item=1,
        title="setters before and after to_empty, and between microbatches",
        by_design={
            **{
                f"plain weights after the backward, set {moment}": Design(
                    "set_reshard_after_backward(False) keeps the weights in memory; modules show sharded parameters, "
                    "which have the gradients",
                    "^False$",
                )
                for moment in MOMENTS
            },
            **{
                f"set_reshard_after_backward(False) {moment}": Design(
                    "a backward that reduces over all axes may be followed by a step, which on some ranks may change "
                    "no rows: all ranks gather kept weights again, no rank asks its own version counters; within "
                    "no_sync() nothing is gathered again",
                    r"^-0.954638, 8, 4$",
                )
                for moment in MOMENTS[:2]
            },
        },
    ),
    Program(loaded_on_meta, item=2, title="a whole state dict into a model on the meta device"),
    Program(extensions, item=3, title="parameters with fsdp_pre_all_gather and fsdp_post_all_gather"),
    Program(
        refused_early,
        item=5,
        title="what failed one step later, or cut a block",
        by_design={
            "assign=True of plain tensors": Design(
                "both refuse; ours at the load, with the way out",
                r"RuntimeError: .*weight.*distribute_tensor",
            ),
            "the forward after it": Design("what was refused has changed nothing", "^3, 4$"),
            "MixedPrecisionPolicy(param_dtype=float8)": Design(
                "both refuse; ours before anything is sharded, with the way out", r"ValueError: .*param_dtype"
            ),
            'granularity="block"': Design("FSDP2 cuts by ranks alone", "^no block is cut$"),
        },
    ),
]
