"""Every setter of a sharded module at every moment of its life: what was set holds from the next microbatch on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import whole
from tests.support.torch_impl.zoo import named
from torch_impl.dtensor.local import is_partial

MOMENTS = ("on the meta device", "with memory", "with values", "between microbatches", "between steps")


def net() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
    return named(blocks=nn.Sequential(*blocks), head=nn.Linear(6, 1))


@dataclass(frozen=True)
class Setter:
    """``call`` sets; ``effect`` is what is then observed otherwise, in a model sharded with ``options``.

    ``gradient``: by what gradients are multiplied. ``refused``: the call raises, at every moment.
    """

    call: Callable[[nn.Sequential], object]
    effect: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gradient: float = 1.0
    refused: bool = False


def on_each(name: str, *args: Any) -> Callable[[nn.Sequential], object]:
    """For setters that reach one module only."""
    return lambda model: [getattr(module, name)(*args) for module in (*model.blocks, model)]


class Event:
    waited = 0

    def wait(self) -> None:
        Event.waited += 1


ONE_AT_A_TIME = {"prefetch": 0}
SETTERS: dict[str, Setter] = {
    "set_buffer_pool of an inner unit": Setter(
        lambda model: model.blocks[1].set_buffer_pool(False), {"pooled": False}
    ),
    "set_gradient_divide_factor": Setter(on_each("set_gradient_divide_factor", 1.0), gradient=2.0),
    "set_reduce_scatter_divide_factor": Setter(
        on_each("set_reduce_scatter_divide_factor", 4.0), gradient=0.5
    ),
    "set_requires_gradient_sync": Setter(
        lambda model: model.set_requires_gradient_sync(False), {"partial": True}
    ),
    "set_requires_all_reduce": Setter(
        lambda model: model.set_requires_all_reduce(False), {"partial": True}, {"strategy": "optim"}
    ),
    "set_is_last_backward": Setter(
        lambda model: model.set_is_last_backward(False), {"partial": True}, {"strategy": "optim"}
    ),
    "set_reshard_after_forward": Setter(
        lambda model: model.set_reshard_after_forward(False), {"after forward": True}
    ),
    "set_reshard_after_backward": Setter(
        lambda model: model.set_reshard_after_backward(False), {"after backward": True}
    ),
    "set_modules_to_forward_prefetch": Setter(
        lambda model: model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]]),
        {"ahead in forward": True},
        ONE_AT_A_TIME,
    ),
    "set_modules_to_backward_prefetch": Setter(
        lambda model: model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]]),
        {"ahead in backward": True},
        ONE_AT_A_TIME,
    ),
    "set_main_gradients": Setter(lambda model: model.set_main_gradients(True), {"main_grad": True}),
    "set_buffer_pool": Setter(lambda model: model.set_buffer_pool(False), {"pooled": False}),
    "set_force_sum_reduction_for_comms": Setter(on_each("set_force_sum_reduction_for_comms", True)),
    "set_post_optim_event": Setter(lambda model: model.set_post_optim_event(Event())),
    "set_unshard_in_backward": Setter(lambda model: model.set_unshard_in_backward(True)),
    "set_keep_unsharded_storage": Setter(lambda model: model.set_keep_unsharded_storage(False)),
    "set_manual_backward_finalization": Setter(lambda model: model.set_manual_backward_finalization(False)),
    "set_reduce_scatter_unused_params": Setter(lambda model: model.set_reduce_scatter_unused_params(False)),
    "set_reduce_scatter_max_input_buffers": Setter(
        lambda model: model.set_reduce_scatter_max_input_buffers(2)
    ),
    "set_separate_reduce_scatter_group": Setter(lambda model: model.set_separate_reduce_scatter_group(False)),
    "set_allocate_memory_from_process_group_for_comm": Setter(
        on_each("set_allocate_memory_from_process_group_for_comm", False)
    ),
    "set_all_reduce_hook": Setter(on_each("set_all_reduce_hook", lambda sums: sums.mul_(2.0)), gradient=2.0),
    "set_custom_all_gather": Setter(lambda model: model.set_custom_all_gather(None), refused=True),
    "set_custom_reduce_scatter": Setter(lambda model: model.set_custom_reduce_scatter(None), refused=True),
    "set_symm_mem_for_comm": Setter(lambda model: model.set_symm_mem_for_comm(), refused=True),
}


def microbatch(model: nn.Sequential, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def life(
    fully_shard: Callable[..., Any], setter: Setter | None, moment: str, options: dict[str, Any]
) -> tuple[nn.Sequential, dict[str, torch.Tensor], dict[str, Any]]:
    """The model after a step of two microbatches and one more microbatch, its gradients then, and what was observed."""
    with torch.device("meta"):
        model = net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)

    def now(at: str) -> None:
        if setter is None or at != moment:
            return
        if setter.refused:
            with pytest.raises(NotImplementedError, match="is not available: "):
                setter.call(model)
        else:
            setter.call(model)

    now("on the meta device")
    model.to_empty(device="cpu")
    now("with memory")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        weights = net().state_dict()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    now("with values")
    microbatch(model, 0)
    now("between microbatches")
    seen: dict[str, Any] = {}
    if fully_shard is torch_impl.fully_shard:
        observe(model, seen)
    # Sums of microbatches under two settings mean nothing; those of the next step alone do.
    model.zero_grad()
    microbatch(model, 1)
    now("between steps")
    if moment == "between steps":
        model.zero_grad()
        microbatch(model, 1)
    return model, {name: param.grad for name, param in model.named_parameters()}, seen


def observe(model: nn.Sequential, seen: dict[str, Any]) -> None:
    """Have hooks write what is there during each microbatch, over what was there during the one before."""
    first, second = model.blocks
    unsharded = second._unit.groups[0].unsharded[0]

    def weights(of: Any) -> bool:
        group_weights = of._unit.groups[0].weights
        return group_weights.gathering or group_weights.compute.allocated

    def in_forward(*_: Any) -> None:
        seen["ahead in forward"] = weights(second)

    def in_backward(grad: torch.Tensor) -> None:
        seen["ahead in backward"] = weights(first)
        seen["main_grad"] = hasattr(unsharded, "main_grad")

    def after_forward(_: Any, __: Any, output: torch.Tensor) -> None:
        seen["after forward"] = weights(first)

    first[0].register_forward_hook(in_forward)
    second[0].register_forward_hook(lambda _, __, output: output.register_hook(in_backward) and None)
    model.register_forward_hook(after_forward)


def summary(model: nn.Sequential, grads: dict[str, torch.Tensor], seen: dict[str, Any]) -> dict[str, Any]:
    return {
        **seen,
        "partial": is_partial(grads["head.weight"]),
        "after backward": model.blocks[0]._unit.groups[0].weights.compute.allocated,
        "pooled": model._unit.schedule.pool.enabled,
    }


@pytest.mark.filterwarnings("ignore:set_reduce_scatter_divide_factor is deprecated")
@pytest.mark.parametrize(
    "name",
    [
        # The others are there for programs that call them, and change nothing.
        pytest.param(name, marks=() if setter.effect or setter.gradient != 1 else pytest.mark.slow)
        for name, setter in SETTERS.items()
    ],
)
@on_ranks(2)
def test_what_is_set_holds_from_the_next_microbatch_on(name: str) -> None:
    setter = SETTERS[name]
    unset = life(torch_impl.fully_shard, None, "", setter.options)
    plain, wanted = summary(*unset), {key: whole(grad) for key, grad in unset[1].items()}
    for moment in MOMENTS:
        model, grads, seen = life(torch_impl.fully_shard, setter, moment, setter.options)
        assert summary(model, grads, seen) == plain | setter.effect, moment
        # What was put off is there after one more microbatch with all set back.
        if setter.effect.get("partial"):
            model.zero_grad()
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)
            microbatch(model, 1)
            grads = {key: param.grad for key, param in model.named_parameters()}
        for key, want in wanted.items():
            text = f"{name} {moment}: {key}"
            torch.testing.assert_close(
                whole(grads[key]), want * setter.gradient, msg=lambda message, text=text: f"{text}: {message}"
            )


def test_no_setter_is_left_out() -> None:
    assert {name.split()[0] for name in SETTERS} == {
        name for name in dir(torch_impl.FSDPModule) if name.startswith("set_")
    }


@on_ranks(2)
def test_gradients_are_divided_as_fsdp2_divides_them_at_every_moment() -> None:
    """FSDP2 divides at the same moments by the same factor; on gloo it needs sums for that."""
    factor = 1.0

    def divide(model: nn.Sequential) -> None:
        for module in (*model.blocks, model):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)

    for moment in MOMENTS:
        grads = [
            life(fully_shard, Setter(divide), moment, {})[1]
            for fully_shard in (torch_impl.fully_shard, fsdp.fully_shard)
        ]
        for key, ours in grads[0].items():
            torch.testing.assert_close(
                ours.full_tensor(), grads[1][key].full_tensor(), msg=f"{moment}: {key}"
            )
