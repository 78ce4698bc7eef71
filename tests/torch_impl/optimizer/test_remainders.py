"""Main weights stored as bfloat16 weights and remainders: a run of the same bits as one with float32 main weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.bench.torch_memory import live_bytes
from tests.support.ranks import RankGroup
from tests.support.torch_impl.mapped_jobs import QKV, Fused, fused_step
from tests.support.torch_impl.toy import Toy, batch, mse, sharded_toy, whole
from torch_impl import (
    CPUOffloadPolicy,
    MainWeightAdamW,
    MainWeightMuon,
    MainWeightSGD,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    load_checkpoint,
    memory_overlaps,
    save_checkpoint,
)
from torch_impl.checkpoint.contents import in_one_piece
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.remainders import join, remainder_of, split
from torch_impl.optimizer import update

TWO_AXES = Placements(("replicate",) * 2, ("partial",) * 2, ("shard",) * 2)


def policy(remainders: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, store_param_remainders=remainders)


def made(remainders: bool, strategy: str = "optim", **options: Any) -> tuple[Toy, MainWeightAdamW]:
    chosen: dict[str, Any] = {"strategy": strategy}
    if strategy == "two axes":
        chosen = {"placements": TWO_AXES, "mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))}
    model = sharded_toy(mp_policy=policy(remainders), **chosen)
    return model, MainWeightAdamW(model.parameters(), lr=1e-2, **options)


def train(model: Toy, optimizer: torch.optim.Optimizer, steps: range, microbatches: int = 1) -> list[float]:
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in steps:
        tokens, targets = batch(step, world, microbatches)
        for k in range(microbatches):
            model.set_is_last_backward(k == microbatches - 1)
            loss = mse(model, tokens[rank, k], targets[rank, k])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(in_one_piece(tensor)).detach().clone().reshape(-1).view(torch.uint8)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's bits of float32 weights and moments."""
    tensors = {name: bits(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"{name}.{key}"] = bits(value)
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def run_both(strategy: str, microbatches: int, options: dict[str, Any]) -> dict[str, Any]:
    runs = []
    for remainders in (False, True):
        model, optimizer = made(remainders, strategy, **options)
        optimizer.init_state()
        begin = state(model, optimizer)
        losses = train(model, optimizer, range(20), microbatches)
        report = model.memory_report(optimizer)
        assert memory_overlaps(model, optimizer) == ()
        runs.append((begin, losses, state(model, optimizer), report, model))
    (begin, losses, end, wide, _), (begin2, losses2, end2, narrow, model) = runs
    groups = [group for unit in model._units(True) for group in unit.groups]
    own = sum(group._group_spec.levels.size(group.strategy.optimizer) for group in groups)
    return {
        "begin": same(begin, begin2),
        "losses": losses == losses2,
        "end": same(end, end2),
        "moved": not same(begin, end),
        "saved": wide.main_weights - narrow.main_weights - 2 * own,
        "main": narrow.main_weights - 2 * own,
        "rest": (wide.compute_weights, wide.moments) == (narrow.compute_weights, narrow.moments),
        "used": any(remainder_of(param).values.any().item() for param in model.parameters()),
    }


@pytest.mark.parametrize(
    ("world", "strategy", "microbatches", "options"),
    [
        (2, "optim", 1, {}),
        pytest.param(4, "optim", 2, {}, marks=pytest.mark.slow),
        pytest.param(2, "no_shard", 2, {}, marks=pytest.mark.slow),
        pytest.param(4, "no_shard", 1, {}, marks=pytest.mark.slow),
        (2, "optim_grads", 1, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float8_e4m3fn}),
        pytest.param(4, "optim_grads", 1, {}, marks=pytest.mark.slow),
        pytest.param(2, "optim_grads", 2, {"offload_fraction": 0.5}, marks=pytest.mark.slow),
        pytest.param(4, "two axes", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_of_float32_main_weights_at_two_bytes_an_own_element_less(
    ranks: RankGroup, world: int, strategy: str, microbatches: int, options: dict[str, Any]
) -> None:
    for facts in ranks.run(world, run_both, strategy, microbatches, options):
        assert facts == {
            "begin": True,
            "losses": True,
            "end": True,
            "moved": True,
            "saved": 0,
            "main": 0,
            "rest": True,
            "used": True,
        }


def test_splitting_is_exact_and_rounds_to_nearest() -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF]
    edges = torch.tensor([*edges, *(edge - (1 << 31) for edge in edges)])
    values = torch.cat([patterns, edges]).to(torch.int32).view(torch.float32)
    weight, remainder = (
        torch.empty_like(values, dtype=torch.bfloat16),
        torch.empty_like(values, dtype=torch.int16),
    )
    before = values.clone().view(torch.int32)
    split(values, weight, remainder)
    assert torch.equal(values.view(torch.int32), before)
    number = ~values.isnan()
    again = join(weight, remainder)
    assert torch.equal(again.view(torch.int32)[number], before[number])
    assert again[~number].isnan().all()
    assert weight[~number].isnan().all()
    cast = values.to(torch.bfloat16).view(torch.int16)
    other = number & (weight.view(torch.int16) != cast)
    # Ties alone, of an even upper half, which a cast rounds down.
    assert other.any()
    assert ((before[other] & 0x1FFFF) == 0x8000).all()
    assert torch.equal(weight.view(torch.int16)[other], cast[other] + 1)


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    before, update.CHUNK = update.CHUNK, size
    try:
        yield
    finally:
        update.CHUNK = before


def run_in_chunks() -> bool:
    ends = []
    for remainders in (False, True):
        torch.manual_seed(5)
        model = fully_shard(nn.Linear(32, 5), strategy="optim", mp_policy=policy(remainders))
        optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
        with chunks_of(16):
            for step in range(3):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(4, 32)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(state(model, optimizer))
    return same(*ends)


def test_an_update_in_many_pieces_has_the_same_bits(ranks: RankGroup) -> None:
    assert ranks.run(2, run_in_chunks) == [True, True]


def run_partly_frozen() -> bool:
    ends = []
    for remainders in (False, True):
        model = Toy()
        model.blocks[0].requires_grad_(False)
        model.count = nn.Parameter(torch.arange(5), requires_grad=False)
        fully_shard(model, strategy="optim", mp_policy=policy(remainders))
        optimizer = MainWeightAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = train(model, optimizer, range(3))
        ends.append((losses, state(model, optimizer)))
        assert (remainder_of(model.blocks[0].stack) is not None) == remainders
        assert remainder_of(model.count) is None
    (losses, end), (losses2, end2) = ends
    return losses == losses2 and same(end, end2)


def test_frozen_weights_keep_their_bits_and_integers_stay(ranks: RankGroup) -> None:
    assert ranks.run(2, run_partly_frozen) == [True, True]


def peak_beyond_rest(rows: int) -> int:
    def build() -> Callable[[], Any]:
        model = fully_shard(nn.Linear(256, rows, bias=False), strategy="optim", mp_policy=policy(True))
        optimizer = MainWeightAdamW(model.parameters())
        optimizer.init_state()
        model.weight.grad = torch.ones_like(model.weight, dtype=torch.float32)
        return optimizer.step

    with chunks_of(1 << 14):
        live = live_bytes(build, torch.device("cpu"))
    return live.peak - live.rest


def test_an_update_needs_memory_for_one_chunk_whatever_the_size(ranks: RankGroup) -> None:
    (small,), (large,) = (ranks.run(1, peak_beyond_rest, rows) for rows in (1 << 9, 1 << 11))
    # Float32 weights, and while they are split a copy, a mask and half of their bits.
    assert large <= 16 * (1 << 14) + 16 * 1024
    assert abs(large - small) < 16 * 1024


def contents(path: Path) -> dict[str, Any]:
    """All of a checkpoint's files, but for the path and the random number that DCP puts into its metadata."""
    files: dict[str, Any] = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    metadata = dcp.FileSystemReader(path).read_metadata()
    files[".metadata"] = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
    if "twinshard_manifest.json" in files:
        files["twinshard_manifest.json"] = json.loads(files["twinshard_manifest.json"])["tensors"]
    return files


def save_both(directory: str) -> list[bool]:
    ok = []
    for remainders in (False, True):
        model, optimizer = made(remainders, "optim")
        train(model, optimizer, range(3))
        save_checkpoint(f"{directory}/{remainders}", model, optimizer, {"step": 3})
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{directory}/plain-{remainders}")
    expected = (train(model, optimizer, range(3, 6)), state(model, optimizer))
    for loads in (False, True):
        for source in (False, True):
            other, its = made(loads, "optim_grads")
            train(other, its, range(7, 9))
            load_checkpoint(f"{directory}/{source}", other, its)
            ok.append(train(other, its, range(3, 6)) == expected[0] and same(state(other, its), expected[1]))
    # Weights alone, from what plain DCP wrote of the one into the other.
    wide, _ = made(False)
    dcp.load({"model": wide.state_dict()}, checkpoint_id=f"{directory}/plain-True")
    narrow, its = made(True)
    load_checkpoint(f"{directory}/plain-False", narrow)
    for (_, left), (_, right) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        ok.append(torch.equal(bits(left), bits(right)))
    train(narrow, its, range(1))
    return ok


def test_checkpoints_are_those_of_float32_main_weights_and_load_into_either(
    ranks: RankGroup, tmp_path: Path
) -> None:
    for equal in ranks.run(2, save_both, str(tmp_path)):
        assert all(equal), equal
    for prefix in ("", "plain-"):
        left, right = (contents(tmp_path / f"{prefix}{which}") for which in (False, True))
        assert left.keys() == right.keys()
        assert {name for name in left if left[name] != right[name]} == set()


def save_under_a_mapping(directory: str) -> list[bool]:
    if dist.get_rank() == 0:
        (Path(directory) / "map.toml").write_text(QKV)
    dist.barrier()
    ok = []
    for remainders in (False, True):
        model = fully_shard(Fused(1), strategy="optim", mp_policy=policy(remainders))
        optimizer = MainWeightAdamW(model.parameters(), lr=0.01)
        fused_step(model, optimizer, 0)
        save_checkpoint(f"{directory}/{remainders}", model, optimizer, mapping=f"{directory}/map.toml")
        other = fully_shard(Fused(2), strategy="no_shard", mp_policy=policy(not remainders))
        its = MainWeightAdamW(other.parameters(), lr=0.01)
        load_checkpoint(f"{directory}/{remainders}", other, its, mapping=f"{directory}/map.toml")
        losses = [fused_step(*run, 1) for run in ((model, optimizer), (other, its))]
        ok.append(losses[0] == losses[1])
    return ok


def test_a_mapping_translates_the_float32_weights(ranks: RankGroup, tmp_path: Path) -> None:
    for equal in ranks.run(2, save_under_a_mapping, str(tmp_path)):
        assert all(equal)
    left, right = contents(tmp_path / "False"), contents(tmp_path / "True")
    assert {name for name in left if left[name] != right[name]} == set()


def edit_in_turn() -> list[str]:
    """What differs after which edit; a rank that raises would leave the others waiting."""
    model, optimizer = made(True)
    wide, its = made(False)
    for module, its_optimizer in ((model, optimizer), (wide, its)):
        train(module, its_optimizer, range(2))
    params, twins = dict(model.named_parameters()), dict(wide.named_parameters())

    wrong: list[str] = []

    def agree(after: str) -> None:
        wrong.extend(
            f"{name} {after}" for name in params if not torch.equal(bits(params[name]), bits(twins[name]))
        )
        # The next forward uses the edited weights on all ranks.
        tokens, _ = batch(50, 1, 1)
        with torch.no_grad():
            if not torch.equal(model(tokens[0, 0]), wide(tokens[0, 0])):
                wrong.append(f"output {after}")

    # A state dict that is loaded where it came from changes nothing.
    model.load_state_dict(model.state_dict())
    agree("a state dict of its own")
    values = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for name, p in params.items()
    }
    for module in (model, wide):
        module.load_state_dict(values)
    agree("load_state_dict")
    values = {name: value * 3 for name, value in values.items()}
    for module in (model, wide):
        set_model_state_dict(module, dict(values), options=StateDictOptions(full_state_dict=True))
    agree("set_model_state_dict")
    with torch.no_grad():
        for chosen in (params, twins):
            chosen["embed.weight"].mul_(0.3)
            chosen["embed.weight"][2].fill_(0.1)
            torch._foreach_add_([chosen["head.weight"], chosen["blocks.0.gain"]], 0.01)
            chosen["head.bias"].copy_(torch.full((1,), 0.3))
            torch.manual_seed(4)
            nn.init.normal_(chosen["blocks.1.stack"])
    agree("edits")
    train(model, optimizer, range(2, 4))
    train(wide, its, range(2, 4))
    agree("more steps")
    # bfloat16 values leave no remainder, whoever writes them.
    with torch.no_grad():
        params["embed.weight"].copy_(torch.full((9, 5), 0.3, dtype=torch.bfloat16))
        params["head.weight"].to_local().fill_(0.3)
    weight = params["head.weight"]
    if local_of(weight).numel():
        shard = weight.__get_tensor_shard__(MetadataIndex("", [0, 0]))
        if not torch.equal(shard, torch.full((1, 5), 0.3, dtype=torch.bfloat16).float()):
            wrong.append("what DCP saves")
    for name in ("embed.weight", "head.weight"):
        if not torch.equal(local_of(in_one_piece(params[name])), local_of(params[name]).float()):
            wrong.append(f"{name} in bfloat16")
    if not any(remainder_of(param).values.any() for param in params.values()):
        wrong.append("other parameters' remainders")
    train(model, optimizer, range(1))
    return wrong


def test_edits_write_to_the_float32_weights(ranks: RankGroup) -> None:
    assert ranks.run(2, edit_in_turn) == [[], []]


def edit_under_a_gather() -> list[bool]:
    model, optimizer = made(True)
    train(model, optimizer, range(1))
    param, equal = model.head.weight, []
    for write in (lambda: param.mul_(2.0), lambda: optimizer.step()):
        # A gather is due.
        with torch.no_grad():
            param.add_(1.0)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight, dtype=torch.float32)
        handle = model.unshard(async_op=True)
        with torch.no_grad():
            write()
        written = bits(param)
        handle.wait()
        model.reshard()
        equal.append(torch.equal(bits(param), written))
        model.unshard()
        whole_weight = model.head.weight.detach().clone()
        model.reshard()
        equal.append(torch.equal(whole_weight, whole(param)))
    return equal


def test_a_write_beside_a_gather_is_not_overwritten(ranks: RankGroup) -> None:
    for equal in ranks.run(2, edit_under_a_gather):
        assert equal == [True] * 4


def stale_backward(strategy: str) -> str:
    model, optimizer = made(True, strategy)
    train(model, optimizer, range(1))
    tokens, targets = batch(1, 1, 1)
    loss = mse(model, tokens, targets)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_backward_through_weights_that_were_written_to_raises(ranks: RankGroup, strategy: str) -> None:
    for message in ranks.run(2, stale_backward, strategy):
        assert "modified by an inplace operation" in message


def init_on_meta() -> bool:
    models = []
    for remainders in (False, True):
        with torch.device("meta"):
            model = Toy()
        for block in model.blocks:
            fully_shard(block, strategy="optim", mp_policy=policy(remainders))
        fully_shard(model, strategy="optim", mp_policy=policy(remainders))
        optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
        model.to_empty(device="cpu")
        torch.manual_seed(9)
        for param in model.parameters():
            nn.init.normal_(param, std=0.3)
        losses = train(model, optimizer, range(3))
        models.append((losses, state(model, optimizer)))
    (losses, end), (losses2, end2) = models
    return losses == losses2 and same(end, end2)


def test_weights_initialized_after_the_meta_device_are_the_same(ranks: RankGroup) -> None:
    assert ranks.run(2, init_on_meta) == [True, True]


def refusals(directory: str) -> dict[str, str]:
    errors = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except BaseException as error:  # DCP's CheckpointException is no Exception
            errors[name] = f"{type(error).__name__}: {error}"

    model, _ = made(True)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.zeros_like(param, dtype=torch.float32)
    note("AdamW", lambda: torch.optim.AdamW(params).step())
    note("SGD", lambda: MainWeightSGD(params, lr=0.1))
    note("Muon", lambda: MainWeightMuon(params))
    dcp.save(model.state_dict(), checkpoint_id=directory)
    note("load", lambda: dcp.load(model.state_dict(), checkpoint_id=directory))

    def shard(mp_policy: MixedPrecisionPolicy, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return lambda: fully_shard(nn.Linear(4, 4, dtype=dtype), mp_policy=mp_policy, **options)

    half = MixedPrecisionPolicy(torch.float16, store_param_remainders=True)
    quantized = MixedPrecisionPolicy(torch.bfloat16, gather_dtype="mxfp8", store_param_remainders=True)
    note("sharded", shard(policy(True)))
    note("float16", shard(half, strategy="optim"))
    note("float64", shard(policy(True), torch.float64, strategy="optim"))
    note("offload", shard(policy(True), strategy="optim", offload_policy=CPUOffloadPolicy()))
    note("float8", shard(quantized, strategy="optim"))
    shard(MixedPrecisionPolicy(store_param_remainders=True), torch.bfloat16, strategy="optim")()
    return errors


def test_other_optimizers_and_unsuitable_units_are_refused(ranks: RankGroup, tmp_path: Path) -> None:
    expected = {
        "AdamW": "TypeError: AdamW: expected .* use MainWeightAdamW",
        "SGD": "TypeError: MainWeightSGD: expected .* use MainWeightAdamW",
        "Muon": "TypeError: MainWeightMuon: expected .* use MainWeightAdamW",
        "load": "dcp.load cannot write .* use torch_impl.load_checkpoint",
        "sharded": "ValueError: .*whole at rest .* got optim_grads_params",
        "float16": "ValueError: weight: expected .*torch.bfloat16 .* got torch.float32 and torch.float16",
        "float64": "ValueError: weight: .* got torch.float64 and torch.bfloat16",
        "offload": "NotImplementedError: .*CPUOffloadPolicy",
        "float8": "NotImplementedError: .*gather_dtype='mxfp8'",
    }
    for errors in ranks.run(2, refusals, str(tmp_path / "plain")):
        assert errors.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, errors[name], re.DOTALL), errors[name]
