"""Wrong use is an error that names what is wrong, and leaves everything as it was."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Block,
    Toy,
    batch,
    full_batch_loss,
    local_loss,
    mse,
    sharded_toy,
    whole,
)

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@on_ranks(1)
def test_wrong_arguments_are_named_and_change_nothing() -> None:
    already = torch_impl.fully_shard(Block())
    with_own_unit = Block()
    with_own_unit._unit = 3
    three_axes = init_device_mesh("cpu", (1, 1, 1))
    cases = [
        (TypeError, "expected a torch.nn.Module or a list of them, got str", "block", {}),
        (ValueError, "a forward, got ModuleList; .*as one unit", nn.ModuleList([Block()]), {}),
        (ValueError, "a forward, got ParameterList", nn.ParameterList([torch.ones(2)]), {}),
        (
            TypeError,
            "module of Python code, got RecursiveScriptModule",
            torch.jit.script(nn.Linear(5, 2)),
            {},
        ),
        (ValueError, "FSDPBlock is already sharded", already, {}),
        (ValueError, "already has an attribute '_unit', .*rename it", with_own_unit, {}),
        (
            ValueError,
            "no_shard, optim, optim_grads, optim_grads_params, .*got 'zero3'",
            Block(),
            {"strategy": "zero3"},
        ),
        (ValueError, "strategy 'hsdp': expected a mesh of two axes", Block(), {"strategy": "hsdp"}),
        (ValueError, r"one or two data-parallel axes, got shape \(1, 1, 1\)", Block(), {"mesh": three_axes}),
        (TypeError, "expected a DeviceMesh, got int", Block(), {"mesh": 4}),
        (
            TypeError,
            "expected a torch_impl.MixedPrecisionPolicy, got dtype",
            Block(),
            {"mp_policy": torch.bfloat16},
        ),
        (
            TypeError,
            "ignored_params: expected parameters, got Linear",
            Block(),
            {"ignored_params": [nn.Linear(1, 1)]},
        ),
        (ValueError, "granularity", Block(), {"granularity": "column"}),
        (ValueError, "positive number, got 0", Block(), {"grad_divisor": 0}),
        (TypeError, "unexpected keyword argument 'sharding'", Block(), {"sharding": True}),
    ]
    for error, message, module, options in cases:
        before = (type(module), list(module.parameters()) if isinstance(module, nn.Module) else None)
        with pytest.raises(error, match=message):
            torch_impl.fully_shard(module, **options)
        assert type(module) is before[0]
        if isinstance(module, nn.Module) and module is not already:
            assert all(a is b for a, b in zip(module.parameters(), before[1], strict=True))
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            if isinstance(module, Block) and module is not with_own_unit:
                torch_impl.fully_shard(module)
                module(torch.ones(1, 5))


def test_sharding_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        torch_impl.fully_shard(Block())


def test_a_policy_with_an_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a floating-point dtype of torch, got torch.int32"):
        torch_impl.MixedPrecisionPolicy(reduce_dtype=torch.int32)


def test_a_name_in_place_of_a_dtype_is_refused_as_one() -> None:
    with pytest.raises(
        ValueError, match=r"main_dtype: expected a floating-point dtype of torch, got 'bfloat16'"
    ):
        torch_impl.MixedPrecisionPolicy(main_dtype="bfloat16")
    weights = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(
        ValueError, match=r"exp_avg_dtype: expected one of .*, got 'bfloat16', which is not a torch.dtype"
    ):
        torch_impl.MainWeightAdamW(weights, exp_avg_dtype="bfloat16")


def different_models(case: str) -> str:
    rank = dist.get_rank()
    options: dict[str, object] = {}
    model = Block()
    if rank == 2:
        if case == "shape":
            model.down = nn.Linear(3, 4, bias=False)
        elif case == "missing":
            del model.gain
        elif case == "strategy":
            options["strategy"] = "optim"
        else:
            model.stack.requires_grad_(False)
    module_class = type(model)
    with pytest.raises(ValueError, match="ranks differ") as caught:
        torch_impl.fully_shard(model, **options)
    assert type(model) is module_class
    return str(caught.value)


def test_ranks_that_differ_all_get_the_first_difference(ranks: RankGroup) -> None:
    for case, message in {
        "shape": r"rank 0 has down.weight \(5, 3\) torch.float32, rank 2 has down.weight \(4, 3\)",
        "missing": r"rank 0 has gain \(\) torch.float32, rank 2 has stack|rank 0 has .*gain",
        "strategy": "strategy: rank 0 has .*'optim_grads_params'.*, rank 2 has .*'optim'",
        "frozen": r"rank 0 has stack \(2, 3, 7\) torch.float32, rank 2 has stack \(2, 3, 7\) torch.float32 frozen",
    }.items():
        for text in ranks.run(3, different_models, case):
            assert re.search(message, text), (case, text)


@on_ranks(2)
def test_copies_pickles_and_conversions_are_refused() -> None:
    model = nn.Sequential(sharded_toy(), nn.BatchNorm1d(3))
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        target = model[0] if attempt is copy.copy else model
        with pytest.raises(TypeError, match="sharded FSDPToy: build the module again"):
            attempt(target)
    with pytest.raises(TypeError, match=r"stays torch.float32 on cpu, got a conversion to torch.bfloat16"):
        model.bfloat16()
    weights = [whole(param) for param in model[0].parameters()]
    model.to("cpu").float()
    for param, value in zip(model[0].parameters(), weights, strict=True):
        assert torch.equal(whole(param), value)


@on_ranks(2)
def test_converting_a_module_inside_a_unit_is_noticed() -> None:
    for convert in (lambda layer: layer.double(), lambda layer: layer.to_empty(device="cpu")):
        model = sharded_toy()
        convert(model.head)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"parameter 'head.weight' was converted or moved after fully_shard"
            ):
                model(torch.arange(4))
        model = sharded_toy()
        model.head.to("cpu")
        model(torch.arange(4)).sum().backward()


@on_ranks(1)
def test_an_error_of_a_conversion_itself_stays_as_it_is() -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("of the conversion")

    with pytest.raises(NotImplementedError, match=r"^of the conversion$"):
        sharded_toy()._apply(refuse)


@on_ranks(2)
def test_replacing_a_sharded_parameter_is_noticed() -> None:
    model = sharded_toy()
    tokens, _ = batch(0, 2, 1)
    with pytest.raises(RuntimeError, match=r"cannot rebind .data"):
        model.head.weight.data = torch.zeros(1, 5)
    model.embed._parameters["weight"] = Toy().embed.weight
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 'embed.weight' was replaced after fully_shard"):
            model(tokens[0].view(-1))


@on_ranks(1)
def test_a_tie_across_units_is_refused() -> None:
    model = Toy()
    model.tied = nn.Linear(5, 7)
    model.tied.weight = model.blocks[0].up.weight
    torch_impl.fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match=r"tied.weight: tied to a parameter that an inner Block unit owns"):
        torch_impl.fully_shard(model)
    assert type(model) is Toy


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_unreduced_gradients_cannot_be_read_and_zero_grad_drops_them(strategy: str) -> None:
    model = sharded_toy(strategy=strategy)
    model.set_requires_gradient_sync(False)
    local_loss(model).backward()
    with pytest.raises(RuntimeError, match="not reduced over the ranks: run the last backward"):
        torch_impl.MainWeightAdamW(model.parameters()).step()
    with pytest.raises(RuntimeError, match=r"without reducing it|one shape and placement"):
        torch.optim.AdamW(model.parameters(), weight_decay=0.0).step()
    with pytest.raises(RuntimeError, match="without reducing it"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="expected a sharded or replicated tensor"):
        model.head.weight.grad.full_tensor()
    reference = Toy()
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        model.set_requires_gradient_sync(True)
        reference.zero_grad()
        full_batch_loss(reference).backward()
        local_loss(model).backward()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(param.grad), want.grad)
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        local_loss(model).backward()


def zeroed_by_an_optimizer(strategy: str, options: dict[str, bool]) -> None:
    model, reference = sharded_toy(strategy=strategy), Toy()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model.set_requires_gradient_sync(False)
    local_loss(model).backward()
    optimizer.zero_grad(set_to_none=False)
    local_loss(model).backward()
    model.set_requires_gradient_sync(True)
    local_loss(model).backward()
    full_batch_loss(reference).backward()
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), 2 * want.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_optimizer_can_zero_unreduced_gradients(ranks: RankGroup, strategy: str) -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        ranks.run(2, zeroed_by_an_optimizer, strategy, options)


class Sums(nn.Module):
    """Two parameters whose gradients are this rank's inputs."""

    uses_b = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = (self.a * x).sum()
        return used + (self.b * x[:2]).sum() if self.uses_b else used


def replace_unreduced_gradients(module: nn.Module, how: str) -> None:
    if how == "copied":
        module.a.grad = module.a.grad.clone()
    elif how == "all copied":
        for param in module.parameters():
            param.grad = param.grad.clone()
    elif how == "zeroed":
        module.a.grad = torch.zeros_like(module.a.grad)
    elif how == "last zeroed":
        module.b.grad = torch.zeros_like(module.b.grad)
    elif how == "reduced":
        module.b.grad = torch.zeros_like(module.b)
    elif how.startswith("dropped"):
        module.b.grad = None
        module.uses_b = how == "dropped"


@pytest.mark.each_value
@pytest.mark.parametrize(
    "how", ["copied", "all copied", "zeroed", "last zeroed", "reduced", "dropped", "dropped and unused"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_unreduced_gradients_may_be_copied_replaced_or_dropped(strategy: str, how: str) -> None:
    model, reference = torch_impl.fully_shard(Sums(), strategy=strategy), Sums()
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.randn(3, world, 4, generator=torch.Generator().manual_seed(3))
    for microbatch, mine in enumerate(inputs[:, rank]):
        model.set_requires_gradient_sync(microbatch == 2)
        model(mine).backward()
        if microbatch == 0:
            replace_unreduced_gradients(model, how)
    for microbatch in range(3):
        for part in inputs[microbatch]:
            (reference(part) / world).backward()
        if microbatch == 0:
            replace_unreduced_gradients(reference, how)
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (want.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(whole(param.grad), want.grad)


@on_ranks(1)
def test_no_sync_is_restored_on_an_error() -> None:
    model = sharded_toy(strategy="optim")
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert all(
        m._unit.gradients.last_backward for m in model.modules() if isinstance(m, torch_impl.FSDPModule)
    )


@on_ranks(2)
def test_ignored_parameters_stay_plain() -> None:
    model = Block()
    ignored = [model.stack]
    torch_impl.fully_shard(model, ignored_params=ignored)
    assert ignored == [model.stack]
    assert type(model.stack) is nn.Parameter
    model(torch.ones(2, 5)).sum().backward()
    assert type(model.stack.grad) is torch.Tensor
    assert isinstance(model.up.weight.grad, torch_impl.dtensor.tensor.RowDTensor)


@on_ranks(1)
def test_sharding_an_outer_module_first_is_named() -> None:
    model = Toy()
    torch_impl.fully_shard(model)
    with pytest.raises(ValueError, match=r"^stack: .*an outer unit has already sharded; shard inner modules"):
        torch_impl.fully_shard(model.blocks[0])
    assert type(model.blocks[0]) is Block
    tokens, targets = batch(0, 1, 1)
    mse(model, tokens, targets).backward()


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


@on_ranks(1)
def test_a_class_that_cannot_be_extended_stays_as_it_was() -> None:
    module = Final(5, 3)
    params = list(module.parameters())
    with pytest.raises(TypeError, match="Final is final"):
        torch_impl.fully_shard(module)
    assert type(module) is Final
    assert all(a is b for a, b in zip(module.parameters(), params, strict=True))
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_pre_hooks):
        assert not hooks
    # Nothing marks the parameters as taken, so an outer module may own them.
    outer = torch_impl.fully_shard(nn.Sequential(module))
    outer(torch.ones(1, 5)).sum().backward()
    assert outer._unit.groups[0].names == ["0.weight", "0.bias"]


@on_ranks(1)
def test_hooks_on_the_given_parameters_are_warned_of() -> None:
    model = Block()
    model.up.bias.register_hook(lambda grad: grad)
    with pytest.warns(
        UserWarning, match=r"^up.bias: hooks registered before fully_shard are no longer called"
    ) as caught:
        torch_impl.fully_shard(model)
    assert [warning.filename for warning in caught] == [__file__]
    model = Block()
    model.stack.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.warns(UserWarning, match="^stack: hooks registered before fully_shard"):
        torch_impl.fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_impl.fully_shard(Block())


@on_ranks(2)
def test_names_and_attributes_are_those_of_the_unsharded_module() -> None:
    model, reference = Toy(), Toy()
    model.blocks[0].stack.role = "expert"
    for module in (model, reference):
        module.tied = nn.Linear(5, 1)
        module.tied.weight = module.head.weight
        module.register_buffer("steps", torch.zeros(3))
    for block in model.blocks:
        torch_impl.fully_shard(block)
    torch_impl.fully_shard(model)
    for names in (
        lambda m: [name for name, _ in m.named_parameters()],
        lambda m: [name for name, _ in m.named_parameters(remove_duplicate=False)],
        lambda m: list(m.state_dict()),
        lambda m: [name for name, _ in m.named_modules()],
    ):
        assert names(model) == names(reference)
        model.blocks[0].unshard()
        assert names(model) == names(reference)
        assert model.blocks[0].stack.role == "expert"
        model.blocks[0].reshard()
    assert model.blocks[0].stack.role == "expert"
    assert repr(model).replace("FSDP", "") == repr(reference)


@on_ranks(1)
def test_assigning_a_parameter_is_noticed() -> None:
    model = sharded_toy()
    model.head.bias = nn.Parameter(torch.zeros(1))
    tokens, _ = batch(0, 1, 1)
    with pytest.raises(RuntimeError, match=r"parameter 'head.bias' was replaced after fully_shard"):
        model(tokens.view(-1))
