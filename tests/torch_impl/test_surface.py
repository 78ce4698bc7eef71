"""Every name of ``torch.distributed.fsdp.fully_shard`` works, or is refused with a message that says what to do."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Block, batch, local_loss, mse, sharded_toy, whole
from torch_impl.fsdp2 import Unavailable, policy_of

# Arguments with which FSDP2's methods are called; a method that is missing here is new in this version of torch.
CALLS: dict[str, tuple[Any, ...]] = {
    "finalize_backward": (),
    "reset_iter_state": (),
    "reshard": (),
    "set_all_reduce_hook": (print,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_gradient_divide_factor": (2.0,),
    "set_is_last_backward": (True,),
    "set_keep_unsharded_storage": (True,),
    "set_manual_backward_finalization": (True,),
    "set_modules_to_backward_prefetch": ([],),
    "set_modules_to_forward_prefetch": ([],),
    "set_post_optim_event": (),
    "set_reduce_scatter_divide_factor": (2.0,),
    "set_reduce_scatter_max_input_buffers": (3,),
    "set_reduce_scatter_unused_params": (True,),
    "set_requires_all_reduce": (True,),
    "set_requires_gradient_sync": (True,),
    "set_reshard_after_backward": (True,),
    "set_reshard_after_forward": (True,),
    "set_separate_reduce_scatter_group": (True,),
    "set_symm_mem_for_comm": (),
    "set_unshard_in_backward": (False,),
    "unshard": (),
}
REFUSED = {
    "finalize_backward",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_every_name_that_fsdp2_exports_is_exported() -> None:
    names = {name for name in dir(fsdp) if not name.startswith("_")} & {
        *fsdp._fully_shard.__all__,
        "fully_shard",
    }
    assert names >= {"FSDPModule", "fully_shard", "MixedPrecisionPolicy", "UnshardHandle"}
    # The handle is what finalize_backward returns, which is refused.
    assert names - set(torch_impl.__all__) <= {"GradientReductionHandle"}


def test_every_argument_of_fsdp2s_fully_shard_is_an_argument_with_the_same_default() -> None:
    theirs = inspect.signature(fsdp.fully_shard).parameters
    ours = inspect.signature(torch_impl.fully_shard).parameters
    assert set(theirs) - set(ours) == set()
    for name, parameter in theirs.items():
        if parameter.default not in (inspect.Parameter.empty, None):
            assert name in ("mp_policy", "offload_policy")
            assert ours[name].default is None
        else:
            assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)


def test_every_method_of_fsdp2_exists_with_the_same_parameters() -> None:
    assert public(fsdp.FSDPModule) - set(CALLS) == set(), "new in this torch: support or refuse it"
    for name in public(fsdp.FSDPModule):
        theirs = inspect.signature(getattr(fsdp.FSDPModule, name)).parameters
        ours = inspect.signature(getattr(torch_impl.FSDPModule, name)).parameters
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ], name


def test_functions_and_other_classes_have_torchs_parameters_and_methods() -> None:
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        theirs, ours = (inspect.signature(getattr(of, name)).parameters for of in (fsdp, torch_impl))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ], name
    assert public(fsdp.UnshardHandle) - public(torch_impl.UnshardHandle) == set()
    # Torch's own, whatever fields a new version adds.
    assert torch_impl.CPUOffloadPolicy is fsdp.CPUOffloadPolicy
    assert torch_impl.OffloadPolicy is fsdp.OffloadPolicy
    if hasattr(fsdp, "DataParallelMeshDims"):
        theirs, ours = (
            {field.name: field.default for field in dataclasses.fields(of.DataParallelMeshDims)}
            for of in (fsdp, torch_impl)
        )
        assert ours == theirs


def test_every_field_of_torchs_policy_is_a_field_of_ours() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(fsdp.MixedPrecisionPolicy)}
    ours = {field.name: field.default for field in dataclasses.fields(torch_impl.MixedPrecisionPolicy)}
    # Read from torch's policy only, and refused where it is set.
    theirs.pop("param_dtype_override_fn", None)
    assert {name: ours[name] for name in theirs} == theirs


class Event:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


def every_method() -> None:
    model = torch_impl.fully_shard(Block())
    event = Event()
    for name, arguments in CALLS.items():
        args = (event,) if name == "set_post_optim_event" else arguments
        if name in REFUSED:
            with pytest.raises(NotImplementedError, match=rf"^{name}.* is not available: \w+"):
                getattr(model, name)(*args)
        elif name == "set_reduce_scatter_divide_factor":
            with pytest.warns(FutureWarning, match="use set_gradient_divide_factor"):
                getattr(model, name)(*args)
            assert model._unit.groups[0].divisor == 2.0
        else:
            assert getattr(model, name)(*args) is None, name
    assert event.waited == 1
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_reduce_scatter_unused_params(False)
    model.set_separate_reduce_scatter_group(False)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_keep_unsharded_storage(False)
    model.set_manual_backward_finalization(False)


def test_every_method_works_or_says_that_it_does_not(ranks: RankGroup) -> None:
    assert public(Unavailable) == REFUSED
    ranks.run(1, every_method)


def setters() -> None:
    model = sharded_toy()
    units = [model._unit, *(block._unit for block in model.blocks)]

    def values(name: str) -> list[Any]:
        return [getattr(unit if hasattr(unit, name) else unit.gradients, name) for unit in units]

    for name in (
        "requires_gradient_sync",
        "requires_all_reduce",
        "reshard_after_forward",
        "reshard_after_backward",
    ):
        getattr(model, f"set_{name}")(True)
        getattr(model, f"set_{name}")(False, recurse=False)
        assert values(name) == [False, True, True], name
        getattr(model, f"set_{name}")(False)
        assert values(name) == [False] * 3, name
    model.set_requires_gradient_sync(True)
    assert values("requires_all_reduce") == [True] * 3
    model.set_is_last_backward(False)
    assert values("last_backward") == [False] * 3
    model.set_unshard_in_backward(True)
    with pytest.raises(
        TypeError, match=r"set_post_optim_event: expected an event with wait\(\), .* got None"
    ):
        model.set_post_optim_event(None)
    with pytest.raises(
        TypeError,
        match="set_all_reduce_hook: expected a function of the summed gradients or None, got 'mul_'",
    ):
        model.set_all_reduce_hook("mul_")
    for name in ("reshard_after_forward", "reshard_after_backward"):
        with pytest.raises(ValueError, match=rf"{name}: expected a bool, got 2"):
            getattr(model, f"set_{name}")(2)
    for name in ("forward", "backward"):
        with pytest.raises(
            ValueError, match=rf"set_modules_to_{name}_prefetch: expected sharded modules, got Linear"
        ):
            getattr(model, f"set_modules_to_{name}_prefetch")([nn.Linear(1, 1)])
        getattr(model, f"set_modules_to_{name}_prefetch")(list(model.blocks))
        assert [ref() for ref in getattr(model._unit, f"{name}_prefetch")] == units[1:]


def test_settings_reach_the_module_or_all_below_it(ranks: RankGroup) -> None:
    ranks.run(1, setters)


@on_ranks(1)
def test_modules_that_prefetch_each_other_are_freed_with_the_model() -> None:
    model = sharded_toy()
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    tokens, targets = batch(0, 1, 1)
    mse(model, tokens, targets).backward()
    units = [weakref.ref(block._unit) for block in model.blocks]
    gc.disable()
    try:
        del model, first, second
        assert [unit() for unit in units] == [None, None]
    finally:
        gc.enable()


def same_program_with(mp_policy: Any) -> list[torch.Tensor]:
    model = sharded_toy(mp_policy=mp_policy, offload_policy=fsdp.OffloadPolicy())
    local_loss(model).backward()
    return [whole(param.grad) for param in model.parameters()]


@on_ranks(2)
def test_torchs_policies_mean_what_ours_mean() -> None:
    fields = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "output_dtype": torch.float64,
        "cast_forward_inputs": False,
    }
    # From torch 2.15 on, torch's policy reduces float32 parameters in float32 unless told otherwise.
    default = torch.float32 if TorchVersion(torch.__version__) >= "2.15.0a0" else torch.bfloat16
    for reduce, meant in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (None, default)):
        ours = same_program_with(torch_impl.MixedPrecisionPolicy(torch.bfloat16, meant))
        theirs = same_program_with(fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    model = torch_impl.fully_shard(Block(), mp_policy=fsdp.MixedPrecisionPolicy(**fields))
    assert model._unit._policy == torch_impl.MixedPrecisionPolicy(**fields)


def test_a_field_of_torchs_policy_that_only_a_newer_torch_has_is_refused_where_it_is_set() -> None:
    @dataclasses.dataclass(frozen=True)
    class Newer(fsdp.MixedPrecisionPolicy):
        only_for: Any = None

    assert policy_of(Newer()) == torch_impl.MixedPrecisionPolicy()
    with pytest.raises(
        NotImplementedError, match=r"MixedPrecisionPolicy.only_for of this torch is not available"
    ):
        policy_of(Newer(only_for=print))


def wanted(placement: Shard | None, mesh: DeviceMesh) -> SimpleNamespace:
    """As torch's ShardPlacementResult, which torch 2.11 lacks."""
    return SimpleNamespace(
        placement=placement, mesh_info=SimpleNamespace(mesh=mesh, shard_mesh_dim=mesh.ndim - 1)
    )


@on_ranks(2)
def test_placements_of_parameters_are_hints_without_influence() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = sharded_toy(mesh=mesh)
    local_loss(plain).backward()
    for hint in (
        lambda param: Shard(param.ndim - 1) if param.ndim else None,
        lambda param: Shard(-1) if param.ndim else Shard(0),
        lambda param: wanted(Shard(1) if param.ndim > 1 else None, mesh),
    ):
        model = sharded_toy(mesh=mesh, shard_placement_fn=hint)
        local_loss(model).backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.placements == expected.placements
            assert torch.equal(param.to_local(), expected.to_local())
            assert torch.equal(param.grad.to_local(), expected.grad.to_local())


@on_ranks(1)
def test_refused_arguments_say_what_to_do_and_change_nothing() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dims = torch_impl.DataParallelMeshDims
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"offload_policy: expected CPUOffloadPolicy\(\), Off", {"offload_policy": "cpu"}),
        (
            NotImplementedError,
            "reshard_after_forward=2 is not available: use True",
            {"reshard_after_forward": 2},
        ),
        (
            TypeError,
            "reshard_after_forward: expected a bool or None, got 'yes'",
            {"reshard_after_forward": "yes"},
        ),
        (
            TypeError,
            r"shard_placement_fn: expected Shard\(dim\), .*, got Replicate",
            {"shard_placement_fn": lambda _: Replicate()},
        ),
        (
            ValueError,
            r"mesh: axis 'tp' is named for model parallelism, .* Rename the axis .*, or name the axis in dp_mesh_dims",
            {"mesh": mesh},
        ),
        (ValueError, "mesh: axis 'tp' is named for model parallelism", {"mesh": mesh["tp"]}),
        (ValueError, "dp_mesh_dims: expected mesh= as well", {"dp_mesh_dims": dims("dp")}),
        (
            ValueError,
            r"expected names of mesh axes, \('dp', 'tp'\), got 'pp'",
            {"mesh": mesh, "dp_mesh_dims": dims("pp")},
        ),
        (
            ValueError,
            r"dp_mesh_dims.shard: expected each axis once, in the order of the mesh, .*, got \('tp', 'dp'\)",
            {"mesh": mesh, "dp_mesh_dims": dims(("tp", "dp"))},
        ),
        (
            ValueError,
            "dp_mesh_dims: expected an axis to shard or to replicate, got Data",
            {"mesh": mesh, "dp_mesh_dims": dims(("dp", "tp"), "dp")},
        ),
        (
            ValueError,
            "expected 'no_shard' without an axis to shard over, got 'optim'",
            {"mesh": mesh, "dp_mesh_dims": dims(replicate="dp"), "strategy": "optim"},
        ),
    ]
    for error, message, options in cases:
        module = Block()
        params = list(module.parameters())
        with pytest.raises(error, match=message):
            torch_impl.fully_shard(module, **options)
        assert type(module) is Block
        assert all(a is b for a, b in zip(module.parameters(), params, strict=True))
        torch_impl.fully_shard(module)(torch.ones(1, 5))
    with pytest.raises(ValueError, match="expected shard or replicate, got neither"):
        dims()


def wrapped_parameters() -> None:
    class Extended(nn.Parameter):
        """Plain values, whose rows have no such method."""

        def fsdp_pre_all_gather(self, *_: Any) -> None: ...

    def wrapped() -> nn.Parameter:
        return nn.Parameter(TwoTensor(torch.ones(4, 3), torch.zeros(4, 3)))

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for weight, message in (
        (wrapped(), r"^weight: expected a plain parameter.*, got a TwoTensor.*ignored_params"),
        (Extended(torch.ones(4, 3)), "^weight: .*fsdp_post_all_gather, got a Extended"),
        (
            nn.Parameter(DTensor.from_local(wrapped(), mesh["tp"], [Replicate()], run_check=False)),
            r"^weight: expected a plain parameter.*, got a TwoTensor.*ignored_params",
        ),
    ):
        module = nn.Linear(3, 4, bias=False)
        module.weight = weight
        with pytest.raises(ValueError, match=message):
            torch_impl.fully_shard(module, mesh=mesh["dp"])
        assert type(module) is nn.Linear
        assert module.weight is weight


def test_wrapper_subclasses_without_extensions_are_refused(ranks: RankGroup) -> None:
    ranks.run(2, wrapped_parameters)


@on_ranks(4)
def test_mesh_axes_are_chosen_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dims in (torch_impl.DataParallelMeshDims("dp"), torch_impl.DataParallelMeshDims(shard=("dp",))):
        model = torch_impl.fully_shard(Block(), mesh=mesh, dp_mesh_dims=dims)
        assert model.stack.device_mesh == mesh["dp"]
        assert model._unit.groups[0].layout.num_shards == 2
    model = torch_impl.fully_shard(
        Block(), mesh=mesh, dp_mesh_dims=torch_impl.DataParallelMeshDims(replicate="tp")
    )
    assert model._unit.groups[0].strategy.name == "no_shard"
    assert model.stack.device_mesh == mesh["tp"]
