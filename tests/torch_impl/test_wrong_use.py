"""What a program that was written for FSDP2 can do wrong: each error names the argument or parameter, and the way out.

``tests/torch_impl/runtime/test_misuse.py`` has what must stay as it was after an error.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.extended import Halved
from torch_impl import fully_shard

Case = tuple[Callable[[], object], type[Exception], str]
# What torch or Python say by themselves.
NOT_OURS = re.compile(
    r"unsupported placements|has no attribute|not iterable|not callable|unhashable|placement type|invalid root rank|"
    r"out of range|Cannot copy out of meta tensor|for tensor subclasses|ranks differ"
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5))


def sharded(**options: Any) -> Any:
    model = net()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def on_meta() -> Any:
    with torch.device("meta"):
        model = net()
    fully_shard(model[0])
    return fully_shard(model)


def inputs() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def unreduced() -> Any:
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(inputs()).sum().backward()
    return model


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor, requires_grad=False)
    return module


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def stock_inside() -> object:
    model = net()
    fsdp.fully_shard(model[0])
    return fully_shard(model)


def of_a_key(key: str) -> object:
    return fully_shard(net(), shard_placement_fn=lambda param: {}[key])


def on_one_rank() -> object:
    """The others wait for the rank that raises, unless it tells them."""
    return of_a_key("some rank") if dist.get_rank() == 1 else fully_shard(net())


ARGUMENTS: dict[str, Case] = {
    "mesh": (lambda: fully_shard(net(), mesh=[0, 1]), TypeError, "mesh: expected a DeviceMesh, got list"),
    "reshard_after_forward": (
        lambda: fully_shard(net(), reshard_after_forward="yes"),
        TypeError,
        "reshard_after_forward: expected a bool or None, got 'yes'",
    ),
    "reshard_after_forward, a number": (
        lambda: fully_shard(net(), reshard_after_forward=2),
        NotImplementedError,
        "reshard_after_forward=2 is not available: use True",
    ),
    "shard_placement_fn": (
        lambda: fully_shard(net(), shard_placement_fn=Shard(0)),
        TypeError,
        r"shard_placement_fn: expected a function of a parameter, which returns Shard\(dim\)",
    ),
    "shard_placement_fn, its result": (
        lambda: fully_shard(net(), shard_placement_fn=lambda param: 1),
        TypeError,
        r"shard_placement_fn: expected Shard\(dim\), .* or None for 0.weight, got 1",
    ),
    "shard_placement_fn, its own error": (lambda: of_a_key("all ranks"), KeyError, "all ranks"),
    "offload_policy": (
        lambda: fully_shard(net(), offload_policy=torch_impl.CPUOffloadPolicy),
        TypeError,
        r"offload_policy: expected CPUOffloadPolicy\(\), OffloadPolicy\(\) or None, got <class",
    ),
    "mp_policy": (
        lambda: fully_shard(net(), mp_policy={"param_dtype": torch.bfloat16}),
        TypeError,
        "mp_policy: expected a torch_impl.MixedPrecisionPolicy, got dict",
    ),
    "ignored_params, one": (
        lambda: fully_shard(net(), ignored_params=nn.Parameter(torch.ones(2))),
        TypeError,
        "ignored_params: expected a set or list of parameters, got Parameter",
    ),
    "ignored_params, a number": (
        lambda: fully_shard(net(), ignored_params=3),
        TypeError,
        "ignored_params: expected a set or list of parameters, got int",
    ),
    "ignored_params, names": (
        lambda: fully_shard(net(), ignored_params=["0.weight"]),
        TypeError,
        "ignored_params: expected parameters, got str",
    ),
    "dp_mesh_dims": (
        lambda: fully_shard(net(), mesh=line(), dp_mesh_dims="dp"),
        TypeError,
        "dp_mesh_dims: expected a DataParallelMeshDims, got 'dp'; DataParallelMeshDims",
    ),
    "dp_mesh_dims, no name": (
        lambda: torch_impl.DataParallelMeshDims(0),
        TypeError,
        "DataParallelMeshDims.shard: expected a name of a mesh axis or a tuple of names, got 0",
    ),
    "dp_mesh_dims, another name": (
        lambda: fully_shard(net(), mesh=line(), dp_mesh_dims=torch_impl.DataParallelMeshDims("tp")),
        ValueError,
        r"dp_mesh_dims: expected names of mesh axes, \('dp',\), got 'tp'",
    ),
    "strategy": (
        lambda: fully_shard(net(), strategy=["optim"]),
        ValueError,
        r"strategy: expected one of no_shard, .*, got \['optim'\]",
    ),
    "grad_divisor": (
        lambda: fully_shard(net(), grad_divisor=True),
        ValueError,
        "grad_divisor: expected a positive number, got True",
    ),
    "a flag of a policy": (
        lambda: torch_impl.MixedPrecisionPolicy(cast_forward_inputs="no"),
        ValueError,
        "MixedPrecisionPolicy.cast_forward_inputs: expected a bool, got 'no'",
    ),
    "a dtype of a policy": (
        lambda: torch_impl.MixedPrecisionPolicy(main_dtype=torch.float8_e4m3fn),
        ValueError,
        "MixedPrecisionPolicy.main_dtype: expected a dtype of two or more bytes, got torch.float8_e4m3fn",
    ),
    "a lazy module": (
        lambda: fully_shard(nn.Sequential(nn.LazyLinear(3))),
        ValueError,
        "0.weight: expected a parameter with a shape, got one of a lazy module; run a forward",
    ),
    "a sparse parameter": (
        lambda: fully_shard(holding(torch.eye(4).to_sparse())),
        ValueError,
        r"weight: expected a dense parameter, got torch.sparse_coo; leave it unsharded \(ignored_params\)",
    ),
    "a model with units of FSDP2": (
        stock_inside,
        ValueError,
        r"fully_shard: 0 \(FSDPLinear\) is already sharded by torch.distributed.fsdp; shard all modules",
    ),
}

METHODS: dict[str, Case] = {
    name: (lambda name=name, args=args: getattr(sharded(), name)(*args), error, message)
    for name, args, error, message in (
        ("unshard", ("now",), ValueError, "async_op: expected a bool, got 'now'"),
        (
            "set_requires_gradient_sync",
            ("no",),
            ValueError,
            "requires_gradient_sync: expected a bool, got 'no'",
        ),
        ("set_requires_all_reduce", (None,), ValueError, "requires_all_reduce: expected a bool, got None"),
        ("set_is_last_backward", ("no",), ValueError, "is_last_backward: expected a bool, got 'no'"),
        (
            "set_reshard_after_forward",
            (None,),
            ValueError,
            "reshard_after_forward: expected a bool, got None",
        ),
        ("set_reshard_after_backward", (True, 3), TypeError, "positional argument"),
        (
            "set_modules_to_forward_prefetch",
            (None,),
            TypeError,
            "set_modules_to_forward_prefetch: expected a list of sharded modules, got NoneType",
        ),
        (
            "set_modules_to_backward_prefetch",
            ([nn.Linear(2, 2)],),
            ValueError,
            "set_modules_to_backward_prefetch: expected sharded modules, got Linear",
        ),
        (
            "set_gradient_divide_factor",
            (0,),
            ValueError,
            "set_gradient_divide_factor: expected a positive number, got 0",
        ),
        ("memory_report", (3,), TypeError, "memory_report: expected an optimizer or None, got int"),
    )
}

MOMENTS: dict[str, Case] = {
    "a forward on meta": (
        lambda: on_meta()(inputs()),
        RuntimeError,
        r"parameter '2.weight' is on the meta device: call model.to_empty\(device=...\), then",
    ),
    "to() on meta": (
        lambda: on_meta().to("cpu"),
        NotImplementedError,
        r"parameter '2.weight' is on the meta device, from which to\(\) cannot copy .*: call model.to_empty",
    ),
    "norms on meta": (
        lambda: torch_impl.parameter_norms(on_meta()),
        RuntimeError,
        "0.weight: expected a tensor with values, got one on the meta device; call model.to_empty",
    ),
    "a search on meta": (
        lambda: torch_impl.find_nonfinite(on_meta()),
        RuntimeError,
        "0.weight: expected a tensor with values, got one on the meta device; call model.to_empty",
    ),
    "a checkpoint of meta": (
        lambda: torch_impl.save_checkpoint("never-written", on_meta()),
        ValueError,
        "0.weight: expected a tensor with memory, got one on the meta device; call model.to_empty",
    ),
    "an unreduced gradient as a whole": (
        lambda: unreduced()[0].weight.grad.full_tensor(),
        RuntimeError,
        r"got a gradient of shape \(7, 8\) that is not yet reduced over the ranks.*run the step's last backward",
    ),
    "a method that is no method": (
        lambda: torch_impl.register_fsdp_forward_method(sharded(), 3),
        ValueError,
        "register_fsdp_forward_method: expected a method of FSDPSequential, got 3",
    ),
}


def distributed(whole: Any = None, mesh: Any = None, extra: Any = (), **options: Any) -> object:
    param = sharded()[0].weight
    whole = torch.ones(7, 8) if whole is None else whole
    mesh = param.device_mesh if mesh is None else mesh
    # Sharding has put its own in the place of torch's function.
    function = torch.distributed.tensor.distribute_tensor
    return function(whole, mesh, [*param.placements, *extra], **options)


def rewrapped(local: Any = None) -> object:
    param = sharded()[0].weight
    return DTensor.from_local(
        param.to_local() if local is None else local, param.device_mesh, param.placements
    )


def loaded(model: Any, whole: bool = True, **options: Any) -> object:
    values = {**net().state_dict(), **options}
    values = {name.replace("__", "."): value for name, value in values.items() if value is not None}
    return set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=whole))


def assigned(**options: Any) -> object:
    model = sharded()
    param = model[0].weight
    values = {
        name: distribute_tensor(tensor, param.device_mesh, [Shard(0)]) for name, tensor in options.items()
    }
    return model.load_state_dict({**model.state_dict(), **values}, assign=True)


LOADS: dict[str, Case] = {
    "distribute_tensor of a list": (
        lambda: distributed([1.0]),
        TypeError,
        "distribute_tensor: expected a tensor, got list",
    ),
    "distribute_tensor without a mesh": (
        lambda: distributed(mesh="cpu"),
        TypeError,
        "distribute_tensor: expected param.device_mesh with the placements of a sharded parameter, got 'cpu'",
    ),
    "distribute_tensor of another shape": (
        lambda: distributed(torch.ones(3, 3)),
        ValueError,
        r"distribute_tensor: expected a tensor of shape \(7, 8\), like the parameter .* got one of shape \(3, 3\)",
    ),
    "distribute_tensor with one placement more": (
        lambda: distributed(extra=[Shard(0)]),
        ValueError,
        "distribute_tensor: expected a placement for each axis .*; pass param.device_mesh and param.placements",
    ),
    "distribute_tensor of no rank": (
        lambda: distributed(src_data_rank=9),
        ValueError,
        "distribute_tensor: expected src_data_rank to be a rank of each axis of .*, got 9",
    ),
    "from_local of a list": (lambda: rewrapped([1.0]), TypeError, "from_local: expected a tensor, got list"),
    "from_local of other rows": (
        lambda: rewrapped(torch.ones(1, 8)),
        ValueError,
        r"local tensor of a tensor of shape \(7, 8\) under .*: expected shape \(\d, 8\), got \(1, 8\)",
    ),
    "a whole tensor of another shape": (
        lambda: loaded(sharded(), **{"0__weight": torch.ones(2, 2), "0.weight": None}),
        RuntimeError,
        r"0.weight: expected a whole tensor of shape \(7, 8\) with values, got one of shape \(2, 2\)",
    ),
    "a whole tensor without values": (
        lambda: loaded(sharded(), **{"0__weight": torch.ones(7, 8, device="meta"), "0.weight": None}),
        RuntimeError,
        r"0.weight: expected a whole tensor of shape \(7, 8\) with values, got one on the meta device",
    ),
    "a whole state dict that lacks a weight, on meta": (
        lambda: loaded(on_meta(), **{"2.bias": None}),
        RuntimeError,
        "parameter '2.bias' is on the meta device: expected a value in the state dict, found none .*; call model",
    ),
    "assign=True of DTensors that are cut otherwise": (
        lambda: assigned(**{"0.weight": torch.ones(7, 8)}),
        RuntimeError,
        r"load_state_dict\(assign=True\): 0.weight: expected .* placed like the sharded parameter, .*distribute_tensor",
    ),
}

OPERATORS: dict[str, Case] = {
    name: (lambda compute=compute: compute(sharded()[2].weight), error, message)
    for name, compute, error, message in (
        (
            "t",
            lambda p: p.t(),
            RuntimeError,
            r"parameter '2.weight' of shape \(5, 7\), .*; use full_tensor\(\)",
        ),
        (
            "svd",
            lambda p: torch.linalg.svd(p),
            RuntimeError,
            r"parameter '2.weight' of .*; use full_tensor\(\)",
        ),
        ("histc", lambda p: p.histc(), RuntimeError, r"parameter '2.weight' of .*; use full_tensor\(\)"),
        (
            "other rows",
            lambda p: p[1:4] + p[2:5],
            RuntimeError,
            r"one shape and placement.*; use full_tensor\(\)",
        ),
        ("a plain one", lambda p: p + torch.ones(5, 7), RuntimeError, r"'2.weight'.*; use full_tensor\(\)"),
        (
            "tolist",
            lambda p: p.tolist(),
            RuntimeError,
            r"^tolist\(\) of parameter '2.weight' .* use full_tensor\(\)",
        ),
        (
            "numpy",
            lambda p: p.detach().numpy(),
            RuntimeError,
            r"^numpy\(\) of a tensor .* use full_tensor\(\)",
        ),
        (
            "share_memory_",
            lambda p: p.share_memory_(),
            RuntimeError,
            r"^share_memory_\(\) of parameter '2.weight'",
        ),
        (
            "data",
            lambda p: setattr(p, "data", torch.ones(5, 7)),
            RuntimeError,
            r".data of parameter '2.weight'.*copy_\(\)",
        ),
        (
            "redistribute",
            lambda p: p.redistribute(placements=[Shard(0)]),
            RuntimeError,
            r"redistribute of parameter '2.weight'.*; use distribute_tensor\(\) of its full_tensor\(\)",
        ),
        (
            "outside of its module",
            lambda p: nn.functional.linear(torch.ones(3, 7), p),
            RuntimeError,
            r"parameter '2.weight'.*have whole weights when the module itself is called \(not its forward\(\)\)",
        ),
        (
            "a backward through the whole",
            lambda p: p.full_tensor().sum().backward(),
            RuntimeError,
            r"backward through full_tensor\(\) of parameter '2.weight' .*: use the weight in its module's forward",
        ),
    )
}


class Answers(Halved):
    """Both methods of the extension return what they are told to."""

    pre: ClassVar[Any] = None
    post: ClassVar[Any] = None

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        if Answers.pre is not None:
            return Answers.pre
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        return Answers.post


def extended(pre: Any = None, post: Any = None) -> object:
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    model[0].weight = nn.Parameter(Answers(model[0].weight.detach()))
    fully_shard(model)
    Answers.pre, Answers.post = pre, post
    return model(inputs())


PRE = r"0.weight: expected fsdp_pre_all_gather to return tensors .*, got TypeError: "
POST = r"0.weight: expected fsdp_post_all_gather of a Answers to return a tensor of shape \(6, 8\), .*, got "
EXTENSIONS: dict[str, Case] = {
    "pre, one value": (
        lambda: extended(pre=torch.ones(3)),
        RuntimeError,
        PRE + "a Tensor in place of two values",
    ),
    "pre, a text": (
        lambda: extended(pre=(("a",), None)),
        RuntimeError,
        PRE + r"\(a str\) in place of tensors",
    ),
    "post, nothing": (lambda: extended(), TypeError, POST + "a NoneType in place of two values"),
    "post, a text": (lambda: extended(post=("a", ())), TypeError, POST + "a str in place of tensors"),
    "post, too small": (
        lambda: extended(post=(torch.ones(2, 2), ())),
        TypeError,
        POST + r"a whole of shape \(2, 2\); leave it unsharded",
    ),
}


def saved_on_another_rank() -> object:
    """In memory, as ``torch.save`` and ``torch.load`` of the wrong file would."""
    model = sharded()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pickle.dumps(dict(model.state_dict())))
    return model.load_state_dict(pickle.loads(everyone[1 - dist.get_rank()]))


def trained_before() -> object:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    return optimizer.zero_grad()


OPTIMIZERS: dict[str, Case] = {
    "built before sharding": (
        trained_before,
        RuntimeError,
        r"parameter '0.weight' of shape \(7, 8\) was collected before fully_shard .*: build the optimizer after",
    ),
    "an unreduced gradient": (
        lambda: torch_impl.MainWeightAdamW(unreduced().parameters()).step(),
        RuntimeError,
        r"gradient of parameter 'weight' of shape \(7, 8\) is not reduced over the ranks: run the last backward",
    ),
    "another state dict": (
        lambda: torch_impl.MainWeightAdamW(sharded().parameters()).load_state_dict({"model": 1}),
        ValueError,
        r"load_state_dict: expected an optimizer's state_dict\(\), with 'state' and 'param_groups', got \['model'\]",
    ),
    "a file of another rank": (
        saved_on_another_rank,
        RuntimeError,
        r"copy_ to parameter 'weight' of shape \(7, 8\): expected this rank's rows, .* each rank must load the file",
    ),
}

TABLES = {
    "arguments": ARGUMENTS,
    "methods": METHODS,
    "moments": MOMENTS,
    "loads": LOADS,
    "operators": OPERATORS,
    "extensions": EXTENSIONS,
    "optimizers": OPTIMIZERS,
}


def answers(table: str) -> dict[str, tuple[str, str]]:
    """What each case raised: the error's class and text."""
    raised = {}
    for name, (attempt, _, _) in TABLES[table].items():
        try:
            raised[name] = ("", f"answered {attempt()!r}")
        except Exception as error:
            raised[name] = (type(error).__name__, str(error))
    return raised


@pytest.mark.parametrize("table", TABLES)
def test_errors_name_what_is_wrong_and_the_way_out(ranks: RankGroup, table: str) -> None:
    for raised in ranks.run(2, answers, table):
        for name, (_, error, message) in TABLES[table].items():
            class_name, text = raised[name]
            assert class_name == error.__name__, f"{name}: {class_name}: {text}"
            assert re.search(message, text, re.DOTALL), f"{name}: {text}"
            assert not NOT_OURS.search(text), f"{name}: {text}"


def told_to_others() -> str:
    with pytest.raises((KeyError, ValueError)) as caught:
        on_one_rank()
    return str(caught.value)


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankGroup) -> None:
    assert all("some rank" in text for text in ranks.run(2, told_to_others))


@on_ranks(2)
def test_a_whole_load_takes_sharded_values() -> None:
    """Of a model that is sharded alike, ``full_state_dict=True`` takes sharded values too, as with FSDP2."""
    source, model = sharded(), sharded()
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        assert ours.to_local().data_ptr() != theirs.to_local().data_ptr() or not ours.to_local().numel()
