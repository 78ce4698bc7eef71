"""Every fault in ``known_faults`` has its test; those that no other file here covers are tested below."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.known_faults import FAULTS, HAZARDS
from tests.support.torch_impl.real_models import MODELS, SAMPLES, rank_batch
from tests.support.torch_impl.toy import (
    Toy,
    assert_same_gradients,
    batch,
    local_loss,
    mse,
    rank_inputs,
    seeded,
    sharded_toy,
    whole,
)
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "torch_impl"


def names_of_tests() -> set[str]:
    """Names of all test functions but those that are skipped or expected to fail."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = {
                    part.attr
                    for decorator in node.decorator_list
                    for part in ast.walk(decorator)
                    if isinstance(part, ast.Attribute)
                }
                if marks.isdisjoint({"skip", "skipif", "xfail"}):
                    names.add(node.name)
    return names


def test_each_of_the_25_faults_and_every_hazard_has_a_test() -> None:
    assert list(FAULTS) == list(range(1, 26))
    names = names_of_tests()
    for fault, tests in (*FAULTS.values(), *HAZARDS.items()):
        assert tests
        assert not set(tests) - names, f"{fault}: no such test"


@pytest.mark.slow
@on_ranks(3)
def test_a_run_with_bfloat16_gradients_is_saved_before_its_first_step(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    runs = []
    for scale in (1.0, 2.0):
        model = sharded_toy(mp_policy=policy)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(scale)
        runs.append((model, torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2, weight_decay=0.5)))
    torch_impl.save_checkpoint(path, *runs[0])
    torch_impl.load_checkpoint(path, *runs[1])
    for (name, first), (_, second) in zip(*(model.named_parameters() for model, _ in runs), strict=True):
        assert torch.equal(whole(first), whole(second)), name
    for step in range(2):
        losses = []
        for model, optimizer in runs:
            loss = local_loss(model, step)
            loss.backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]


@pytest.mark.fast_cases("MainWeightAdamW")
@pytest.mark.parametrize("optimizer_name", ["AdamW", "MainWeightAdamW"])
@on_ranks(3)
def test_optimizer_state_made_by_torch_moves_no_weight(optimizer_name: str) -> None:
    model, other = sharded_toy(), sharded_toy()
    build = getattr(torch_impl, optimizer_name, None) or getattr(torch.optim, optimizer_name)
    before = {name: whole(param).clone() for name, param in model.named_parameters()}
    optimizer, fresh = (build(module.parameters(), lr=0.1, weight_decay=0.5) for module in (model, other))
    get_optimizer_state_dict(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name]), name
    for step in range(3):
        local_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, optimizer))
    for name, param in other.named_parameters():
        assert torch.equal(whole(param), before[name]), name
    pairs = zip(optimizer.state.values(), fresh.state.values(), strict=True)
    for state, loaded in pairs:
        assert state["step"] == loaded["step"]
        assert torch.equal(whole(state["exp_avg"]), whole(loaded["exp_avg"]))


@pytest.mark.parametrize("optimizer_name", ["AdamW", "SGD", "MainWeightAdamW"])
@on_ranks(2)
def test_an_optimizer_built_before_sharding_is_an_error(optimizer_name: str) -> None:
    model = Toy()
    build = getattr(torch_impl, optimizer_name, None) or getattr(torch.optim, optimizer_name)
    optimizer = build(model.parameters(), lr=0.1)
    torch_impl.fully_shard(model)
    local_loss(model).backward()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="fully_shard"):
        optimizer.step()


@pytest.mark.fast_cases("optim_grads_params", "optim")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_an_axis_of_a_larger_mesh_reduces_over_its_own_ranks(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = seeded(Toy), seeded(Toy)
    for module in (*model.blocks, model):
        torch_impl.fully_shard(module, mesh=mesh["dp"], strategy=strategy)
    tokens, targets = (part.view(2, 2, -1) for part in batch(0, 4, 1))
    replica = mesh.get_local_rank("tp")
    own = mesh.get_local_rank("dp"), replica
    mse(model, tokens[own], targets[own]).backward()
    mse(reference, tokens[:, replica], targets[:, replica]).backward()
    assert_same_gradients(model, reference)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.empty = nn.Linear(5, 0)
        self.no_columns = nn.Parameter(torch.randn(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.empty(x) @ self.no_columns.t()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_tensors_without_columns_train_and_load(strategy: str) -> None:
    model, reference = torch_impl.fully_shard(seeded(Columns), strategy=strategy), seeded(Columns)
    inputs = rank_inputs()
    model(inputs[dist.get_rank()]).square().mean().backward()
    reference(torch.cat(inputs)).square().mean().backward()
    assert_same_gradients(model, reference)
    torch.optim.AdamW(model.parameters()).step()
    model.load_state_dict(reference.state_dict())
    assert whole(model.no_columns).shape == (3, 0)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@on_ranks(2)
def test_kept_compute_weights_are_refreshed_in_the_same_memory(strategy: str) -> None:
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_toy(strategy=strategy, mp_policy=policy)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    seen: list[tuple[int, float]] = []
    up = model.blocks[1].up
    up.register_forward_pre_hook(lambda *_: seen.append((up.weight.data_ptr(), up.weight.sum().item())))
    for step in range(3):
        local_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.memory_report().gradients == 0
    assert len({address for address, _ in seen}) == 1
    assert len({value for _, value in seen}) == 3


class Fused(nn.Module):
    """A gate and an up projection in one tensor, as a matrix and as a stack of matrices."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(2 * size, 5))
        self.experts = nn.Parameter(torch.randn(2, 2 * size, 3))
        self.bias = nn.Parameter(torch.randn(7))


def save_fused(path: str, size: int) -> int:
    """Returns how many rows of ``w13`` this rank holds."""
    with torch.random.fork_rng():
        torch.manual_seed(size)
        model = torch_impl.fully_shard(Fused(size))
    dcp.save(model.state_dict(), checkpoint_id=path)
    return len(model.w13.to_local())


def test_halves_of_a_fused_tensor_are_right_wherever_a_shard_ends(ranks: RankGroup, tmp_path: Path) -> None:
    ends = set()
    for world in (2, 3, 4):
        for size in (3, 4, 6):
            path = str(tmp_path / f"{world}-{size}")
            end = 0
            for rows in ranks.run(world, save_fused, path, size):
                end += rows
                if 0 < end < 2 * size:
                    ends.add("border" if end == size else "first" if end < size else "second")
            with torch.random.fork_rng():
                torch.manual_seed(size)
                expected = Fused(size)
            loaded = {name: torch.zeros_like(param) for name, param in expected.named_parameters()}
            dcp.load(loaded, checkpoint_id=path, no_dist=True)
            for name, axis in (("w13", 0), ("experts", 1)):
                halves = loaded[name].chunk(2, axis)
                for half, wanted in zip(halves, getattr(expected, name).chunk(2, axis), strict=True):
                    assert torch.equal(half, wanted), (world, size, name)
    assert ends == {"first", "border", "second"}


# Which modules may use names that torch does not promise to keep, so that a new version is followed in few places.
PRIVATE = {
    "checkpoint/full_state_dict.py",
    "comm/collectives.py",
    "diagnostics/nonfinite.py",
    "dtensor/local.py",
    "dtensor/operator_rules.py",
    "dtensor/ops.py",
    "dtensor/tensor.py",
    "dtensor/reductions.py",
    "dtensor/views.py",
    "optimizer/update.py",
    "parallel/modules.py",
    "runtime/ground/autograd.py",
    "runtime/weights/extension.py",
    "runtime/ground/ownership.py",
    "runtime/ground/tensor_parallel.py",
    "runtime/ground/transforms.py",
    "runtime/ground/trees.py",
    "runtime/unit/outputs.py",
}


def private_names(path: Path) -> set[str]:
    """Private modules of torch that are imported, and private attributes of modules and functions of torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    private, from_torch = set(), set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        if not any(name.split(".")[0] == "torch" for name in names):
            continue
        assert isinstance(node, ast.Import | ast.ImportFrom)
        private |= {name for name in names if any(part.startswith("_") for part in name.split("."))}
        from_torch |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if (
            isinstance(node, ast.Attribute)
            and isinstance(root, ast.Name)
            and root.id in from_torch
            and node.attr.startswith("_")
            and not node.attr.startswith(("_foreach_", "__"))  # those of the first kind are documented
        ):
            private.add(ast.unparse(node))
    return private


def test_private_names_of_torch_are_used_where_they_are_declared() -> None:
    private = {path.relative_to(PACKAGE).as_posix(): private_names(path) for path in PACKAGE.rglob("*.py")}
    users = {name: names for name, names in private.items() if names}
    assert set(users) <= PRIVATE, {name: users[name] for name in set(users) - PRIVATE}


def python_calls(library: str, optimizer: Callable[..., torch.optim.Optimizer]) -> int:
    """Calls of functions, Python's and C's, in a step."""
    fsdp = import_module(library)
    model = Decoder(DecoderConfig(vocab_size=61, d_model=12, n_layers=6, n_heads=2, head_dim=6, d_ff=13))
    for module in (*model.layers, model):
        fsdp.fully_shard(module)
    updates = optimizer(model.parameters(), lr=1e-2)
    tokens = torch.randint(61, (2, 8))

    def step() -> None:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        updates.step()
        updates.zero_grad()

    count = 0

    def counting(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(3):
        step()
    gc.collect()
    sys.setprofile(counting)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def calls_of_both() -> tuple[int, int]:
    ours = python_calls("torch_impl", torch_impl.MainWeightAdamW)
    return ours, python_calls("torch.distributed.fsdp", torch.optim.AdamW)


@pytest.mark.slow
def test_a_step_makes_fewer_python_calls_than_fsdp2(ranks: RankGroup) -> None:
    for ours, theirs in ranks.run(2, calls_of_both):
        assert ours < theirs


def assert_ranks_differ(gradients: list[torch.Tensor]) -> None:
    """Any rank's gradient in place of the mean would be noticed."""
    mean = torch.stack(gradients).mean(0)
    for gradient in gradients:
        assert (gradient - mean).norm() > 0.05 * mean.norm()


def gradient_of(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def test_every_ranks_data_has_gradients_of_its_own() -> None:
    toy = Toy()
    tokens, targets = batch(0, 4, 1)
    assert_ranks_differ([gradient_of(toy, mse(toy, tokens[k], targets[k])) for k in range(4)])
    for name, recipe in MODELS.items():
        model = recipe.seeded()
        parts = [rank_batch(name, 0, rank, 3) for rank in range(3)]
        assert_ranks_differ([gradient_of(model, model(**part).loss) for part in parts])
        assert len(recipe.batch(0, 3 * SAMPLES)["labels"]) == sum(len(part["labels"]) for part in parts)


@on_ranks(2)
def test_the_callers_set_of_ignored_parameters_stays_as_it_was() -> None:
    model = Toy()
    ignored = {model.embed.weight}
    torch_impl.fully_shard(model, ignored_params=ignored)
    assert ignored == {model.embed.weight}
