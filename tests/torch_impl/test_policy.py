"""Models that are sharded by a policy; what a policy may say is tested in ``tests/sharding/test_policy.py``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import torch_impl
from bridge.core.sharding.policy.recompute import SELECTIVE
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_same_gradients, assert_same_weights, mean_over_ranks, seeded
from tests.support.torch_impl.zoo import named
from torch_impl import PolicyError, PrecisionPolicy, ShardingPolicy, UnitPolicy
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

CONFIG = DecoderConfig(vocab_size=23, d_model=18, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=19)
MICROBATCHES = 3
ROOT = UnitPolicy("")


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    """Weights so large that every parameter matters to the loss."""
    model = Decoder(config)
    model.init_weights(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(10)
    return model


def tokens(step: int, world: int) -> torch.Tensor:
    """``[world, microbatches, rows, length]``: different on every rank and microbatch."""
    generator = torch.Generator().manual_seed(40 + step)
    return torch.randint(0, CONFIG.vocab_size, (world, MICROBATCHES, 2, 7), generator=generator)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.reshape(-1, rows.shape[-1])
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def train_step(model: Any, step: int) -> torch.Tensor:
    """The mean loss of this rank's microbatches."""
    mine, total = tokens(step, dist.get_world_size())[dist.get_rank()], torch.zeros(())
    for k, rows in enumerate(mine):
        model.set_is_last_backward(k == MICROBATCHES - 1)
        loss = loss_of(model, rows) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total


# Collectives of a unit in a step of K microbatches: all-gathers, reduce-scatters, all-reduces.
K = MICROBATCHES
COUNTS = {
    "no_shard": (0, 0, 1),
    "optim": (1, 1, 0),
    "optim_grads": (1, K, 0),
    "optim_grads_params": (2 * K, K, 0),
    "hsdp": (2 * K, K, 1),
    "hfsdp": (2 * K + 1, K + 1, 0),
}
# An outer axis of one rank takes no collectives.
COUNTS_OF_ONE_REPLICA = COUNTS | {"hsdp": (2 * K, K, 0), "hfsdp": (2 * K, K, 0)}
LAYERS = [f"layers.{n}" for n in range(CONFIG.n_layers)]
STRATEGY = {
    "zero1": "optim",
    "zero2": "optim_grads",
    "fsdp": "optim_grads_params",
    "fsdp_bf16": "optim_grads_params",
}
BLOCKS = "block(16)"


def expected_units(name: str) -> dict[str, tuple[str, str]]:
    """Strategy and granularity of each unit of the decoder under a shipped policy."""
    if name == "mixture":
        layers = dict.fromkeys(LAYERS, ("optim_grads_params", "row"))
        mlps = {f"{layer}.mlp": ("optim_grads_params", BLOCKS) for layer in LAYERS}
        return layers | mlps | {"embed": ("optim", "row"), "": ("optim_grads", "tensor")}
    return dict.fromkeys([*LAYERS, ""], (STRATEGY.get(name, name), "row"))


def shipped(name: str) -> None:
    policy = ShardingPolicy.load(name)
    model, reference = decoder(), decoder()
    world = dist.get_world_size()
    assert policy.apply(model) is model
    units = expected_units(name)
    _check_report(model, policy, units)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    low = policy.precision.compute == "bfloat16"
    for step in range(3):
        with torch_impl.count_collectives(model) as count:
            losses = train_step(model, step)
            want = loss_of(reference, tokens(step, world))
            want.backward()
            if not low:
                assert_same_gradients(model, reference, rtol=1e-3, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
        torch.testing.assert_close(mean_over_ranks(losses), want.detach(), rtol=2e-2 if low else 1e-4, atol=0)
        if step:
            known = COUNTS if world == 4 else COUNTS_OF_ONE_REPLICA
            calls = {
                unit: tuple(count.calls_of[unit, collective] for collective in COLLECTIVES) for unit in units
            }
            assert calls == {unit: known[strategy] for unit, (strategy, _) in units.items()}
    if not low:
        assert_same_weights(model, reference, rtol=1e-3, atol=1e-5)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def _check_report(model: nn.Module, policy: ShardingPolicy, units: dict[str, tuple[str, str]]) -> None:
    world = dist.get_world_size()
    plain = dict(decoder().named_parameters())
    report = torch_impl.layout_report(model)
    assert {unit.name for unit in report.units} == set(units)
    assert report.ignored == ()
    for unit in report.units:
        strategy, granularity = units[unit.name]
        (group,) = unit.groups
        assert unit.reshard_after_forward is True
        assert group.strategy == strategy
        assert group.mesh == ((world // 2, 2) if "dp_outer" in policy.mesh else (world,))
        prefix = f"{unit.name}.".lstrip(".")
        shapes = {name: tuple(plain[prefix + name].shape) for name in group.parameters}
        layout = torch_impl.plan_layout(shapes, group.num_shards, granularity=granularity)
        assert group.fingerprint == layout.fingerprint
        compute = "bfloat16" if policy.source == "fsdp_bf16.toml" else "float32"
        dtypes = (group.main_dtype, group.compute_dtype, group.reduce_dtype, group.grad_dtype)
        assert dtypes == ("float32", compute, "float32", "float32")
    assert [name for name, _ in model.named_parameters()] == list(plain)


EXAMPLES = ["no_shard", "zero1", "zero2", "fsdp", "fsdp_bf16", "hsdp", "hfsdp", "mixture"]


@pytest.mark.fast_cases("hfsdp-4", "mixture-2", "fsdp_bf16-2", "no_shard-2", "zero1-2")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_shipped_policies_train_as_one_process_on_the_whole_batch(
    ranks: RankGroup, name: str, world: int
) -> None:
    ranks.run(world, shipped, name)


class Noisy(nn.Module):
    """Counts its forwards; dropout shows whether they see the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 6)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.forwards += 1
        hidden = torch.dropout(torch.tanh(self.up(x)), 0.5, self.training)
        return x + scale * self.down(hidden)


class Pair(nn.Module):
    """Parameters of its own before and after two units inside; what ends its forward saves nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.first, self.second = Noisy(), Noisy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x), scale=0.5))


def net() -> nn.Sequential:
    return seeded(lambda: named(layers=nn.Sequential(Pair(), Pair()), head=nn.Linear(6, 1)), 1)


INNER = [f"layers.{i}.{child}" for i in (0, 1) for child in ("first", "second")]


def trained(recomputed: tuple[str, ...]) -> dict[str, Any]:
    """Losses of three steps; forwards of a module, collectives by unit and saved bytes of the last one."""
    entries = [
        UnitPolicy(match, recompute=match in recomputed) for match in ("layers.*", "layers.*.[fs]*", "")
    ]
    model: Any = ShardingPolicy(tuple(entries)).apply(net())
    noisy = model.layers[0].first
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(8, 6)
    result: dict[str, Any] = {"names": list(model.state_dict()), "losses": []}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        result["saved"] += tensor.numel() * tensor.element_size()
        return tensor

    for _ in range(3):
        result["saved"] = noisy.forwards = 0
        with torch_impl.count_collectives(model) as count:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(x).square().mean()
            loss.backward()
        result["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    result["forwards"] = noisy.forwards
    result["calls"] = {
        unit: [count.calls_of[unit, collective] for collective in COLLECTIVES] for unit, _ in count.calls_of
    }
    noisy.forwards = 0
    with torch.no_grad():
        model.eval()(x)
    assert noisy.forwards == 1
    return result


@pytest.mark.fast_cases("recomputed1-1", "recomputed4-3")
@pytest.mark.parametrize(
    ("recomputed", "depth"),
    [
        (("layers.*.[fs]*",), 1),
        (("layers.*",), 1),
        (("",), 1),
        (("layers.*", "layers.*.[fs]*"), 2),
        (("", "layers.*", "layers.*.[fs]*"), 3),
    ],
)
@on_ranks(2)
def test_recomputed_units_gather_no_more_often_and_train_alike(
    recomputed: tuple[str, ...], depth: int
) -> None:
    """``depth``: how often the innermost forward runs again."""
    plain, again = trained(()), trained(recomputed)
    assert again["losses"] == plain["losses"]
    assert len(set(plain["losses"])) == 3
    assert (plain["forwards"], again["forwards"]) == (1, 1 + depth)
    assert plain["calls"] == {unit: [2, 1, 0] for unit in ("", "layers.0", "layers.1", *INNER)}
    assert again["calls"] == plain["calls"]
    assert again["saved"] < plain["saved"]
    assert again["names"] == plain["names"] == list(net().state_dict())


class Attending(nn.Module):
    """Products of weights and of batches of matrices, and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return self.last(torch.softmax(y @ y.transpose(1, 2), -1) @ y)


def attentive() -> nn.Sequential:
    return seeded(lambda: named(layers=nn.Sequential(Attending(), Attending())), 1)


class Counting(TorchDispatchMode):
    """Calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def kept(recompute: bool | str) -> tuple[list[float], Counter[str], int]:
    """Losses of two steps; operators of the last, and how often its units are gathered."""
    model: Any = ShardingPolicy((UnitPolicy("layers.*", recompute=recompute), UnitPolicy(""))).apply(
        attentive()
    )
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    x, losses = torch.randn(3, 4, 6), []
    for _ in range(2):
        with torch_impl.count_collectives(model) as count, Counting() as counting:
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, counting.calls, sum(count.calls_of[unit, "all_gather"] for unit, _ in count.calls_of)


def keeping() -> None:
    plain, again, dots, weighted = (kept(recompute) for recompute in (False, True, *SELECTIVE))
    for losses, _, gathers in (again, dots, weighted):
        assert losses == plain[0]
        assert gathers == plain[2]

    def calls(run: tuple[list[float], Counter[str], int], name: str) -> int:
        return run[1][name] - plain[1][name]

    # Of two layers, in backward: products of weights (not the last, which backward needs no result of), of batches, ...
    assert [calls(again, name) for name in ("addmm", "bmm", "_softmax")] == [2, 4, 2]
    assert [calls(dots, name) for name in ("addmm", "bmm", "_softmax")] == [0, 0, 2]
    assert [calls(weighted, name) for name in ("addmm", "bmm", "_softmax")] == [0, 4, 2]


def test_products_are_kept_and_the_rest_is_computed_again(ranks: RankGroup) -> None:
    ranks.run(2, keeping)


@on_ranks(1)
def test_a_name_is_for_units_without_units_inside() -> None:
    policy = ShardingPolicy(
        (
            UnitPolicy("layers.*", recompute="dots_saveable"),
            UnitPolicy("layers.*.first"),
            UnitPolicy(""),
        )
    )
    with pytest.raises(PolicyError, match=r"unit 'layers.0': recompute: .* around 'layers.0.first'"):
        policy.apply(attentive())


class Broken(nn.Linear):
    """``fully_shard`` refuses it after all checks of the policy."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self._original_class = "mine"


def shared() -> nn.Sequential:
    """One module at two places."""
    model = named(a=nn.Sequential(nn.Linear(3, 3)), b=nn.Sequential(nn.Linear(3, 3)))
    model.b[0] = model.a[0]
    return model


def ties() -> nn.Sequential:
    model = named(a=nn.Embedding(4, 3), b=nn.Linear(3, 4, bias=False))
    model.b.weight = model.a.weight
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].forward = model[0].forward
    return model


def policy_of(*matches: str, **options: Any) -> ShardingPolicy:
    return ShardingPolicy(tuple(UnitPolicy(match) for match in (*matches, "")), **options)


@on_ranks(4)
def test_policies_that_do_not_fit_leave_the_model_as_it_was() -> None:
    world = dist.get_world_size()
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    named = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    recomputed = ShardingPolicy((UnitPolicy("0", recompute=True), ROOT))
    float64 = PrecisionPolicy(main="float64")
    for policy, build, options, reason in (
        (
            policy_of("layer.*", source="f.toml"),
            decoder,
            {},
            r"f.toml: \[\[unit\]\] 1: match: .*near: layers",
        ),
        (policy_of("layers"), decoder, {}, "'layers' matches, got none; near: layers"),
        (policy_of(mesh={"dp": 3}), decoder, {}, r"\[mesh\]: expected axes of 4 devices in all, got dp = 3"),
        (
            policy_of(precision=float64),
            decoder,
            {},
            "expected torch.float64 main weights, got embed.weight in torch.f",
        ),
        (
            policy_of(),
            lambda: decoder().double(),
            {},
            "main: expected torch.float32 main weights, got embed.weight",
        ),
        (policy_of("a", "b"), ties, {}, "got 'a.weight' of unit 'a' tied to 'b.weight' of unit 'b'"),
        (policy_of("a"), shared, {}, "got 'a.0.weight' of unit 'a' tied to 'b.0.weight' of unit ''"),
        (policy_of(), lambda: nn.ModuleList([nn.Linear(2, 2)]), {}, "a model with a forward, got ModuleList"),
        (recomputed, patched, {}, "'0': recomputation expects a forward that the module's class defines"),
        (recomputed, lambda: nn.Sequential(Broken()), {}, "already has an attribute '_original_class'"),
        (
            policy_of(),
            decoder,
            {"mesh": square},
            r"\[mesh\]: expected a mesh of \{'dp': 4\}, got shape \(2, 2\)",
        ),
        (policy_of(), decoder, {"mesh": named}, r"expected a mesh of \{'dp': 4\}, got .* axes \('data',\)"),
        (policy_of(mesh={"dp": 2}), decoder, {"mesh": line}, "expected axes of 4 devices in all, got dp = 2"),
        (
            policy_of(),
            decoder,
            {"mesh": line, "device_type": "cpu"},
            "expected mesh or device_type, got both",
        ),
    ):
        model = build()
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=reason):
            policy.apply(model, **options)
        assert [type(module) for module in model.modules()] == before
        assert all(type(param) is nn.Parameter for param in model.parameters())
    with pytest.raises(TypeError, match="expected a DeviceMesh, got tuple"):
        policy_of().apply(decoder(), mesh=(4,))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"):
        policy_of().apply([decoder()])
    sharded = policy_of().apply(decoder())
    with pytest.raises(PolicyError, match="expected a model that is not sharded yet, got a unit at ''"):
        policy_of().apply(sharded)


def test_without_a_process_group_nothing_is_sharded() -> None:
    model = decoder()
    with pytest.raises(
        PolicyError, match=r"fsdp\.toml: expected a process group, got none; call torch\.dist"
    ):
        ShardingPolicy.load("fsdp").apply(model)
    assert type(model) is Decoder


@on_ranks(4)
def test_a_mesh_may_be_given_instead_of_made() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp"))
    for two_by_two in (mesh, init_device_mesh("cpu", (2, 2))):
        model = ShardingPolicy.load("hsdp").apply(decoder(), mesh=two_by_two)
        assert model.norm.weight.device_mesh is two_by_two
    # Part of a larger mesh: its ranks are those that the policy speaks of.
    model = policy_of("layers.*", mesh={"dp": 2}).apply(decoder(), mesh=mesh["dp"])
    assert torch_impl.layout_report(model).units[0].groups[0].mesh == (2,)
    made = ShardingPolicy.load("hsdp").apply(decoder(), device_type="cpu")
    assert made.norm.weight.device_mesh.mesh_dim_names == ("dp_outer", "dp")


@on_ranks(2)
def test_precision_is_that_of_the_policy_whatever_the_model_was_given_in() -> None:
    model = policy_of().apply(shared())
    assert [name for name, _ in model.named_parameters()] == ["a.0.weight", "a.0.bias"]
    low = policy_of("layers.*").apply(decoder().bfloat16())
    (group,) = torch_impl.layout_report(low).units[0].groups
    assert (group.main_dtype, group.compute_dtype, group.grad_dtype) == ("float32",) * 3
    chosen = PrecisionPolicy("float64", "bfloat16", "float16", "float32")
    wide = policy_of("layers.*", precision=chosen).apply(decoder().double())
    (group,) = torch_impl.layout_report(wide).units[0].groups
    dtypes = (group.main_dtype, group.compute_dtype, group.reduce_dtype, group.grad_dtype)
    assert dtypes == ("float64", "bfloat16", "float16", "float32")


def test_remainders_of_parameters_that_a_model_axis_cuts_are_refused_before_anything_is_changed() -> None:
    text = """
[mesh]
dp = "all"
tp = 2
[precision]
compute = "bfloat16"
store_param_remainders = true
[[unit]]
match = ""
strategy = "optim"
[[parallel]]
match = ["0"]
axis = "tp"
style = "colwise"
"""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        PolicyError,
        match=r"mine: \[precision\] store_param_remainders: expected a policy without \[\[parallel\]\]",
    ):
        ShardingPolicy.parse(text, "mine").apply(model)
    assert type(model) is nn.Sequential
