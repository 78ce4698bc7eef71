"""The shipped decoder, tensor-parallel and sharded, trains as one process on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.cut_decoder import (
    CONFIG,
    EXACT,
    assert_trains_like_one_process,
    cut_decoder,
    decoder,
    loss_of,
    rows,
)
from torch_impl import ParallelPolicy
from torch_impl.dtensor.local import local_of

WORLD = 4


@pytest.mark.fast_cases("mesh0-1-False-options0", "mesh3-2-True-options3")
@pytest.mark.parametrize(
    ("mesh", "microbatches", "fused", "options"),
    [
        ({"dp": "all", "tp": 2}, 1, False, {}),
        ({"dp": 2, "tp": 2}, 2, True, {"strategy": "optim_grads", "recompute": True}),
        ({"dp": 2, "tp": 2}, 2, False, {"strategy": "no_shard"}),
        ({"outer": 2, "dp": 1, "tp": 2}, 2, True, {"strategy": "hsdp", "recompute": True}),
        ({"dp": 1, "tp": 4}, 1, True, {}),
    ],
)
@on_ranks(WORLD)
def test_losses_norms_and_weights_are_those_of_one_process(
    mesh: dict[str, int | str], microbatches: int, fused: bool, options: dict[str, Any]
) -> None:
    model, reference = cut_decoder(mesh, **options), decoder()
    if fused:
        optimizer: torch.optim.Optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    data = WORLD // int(mesh["tp"])
    assert_trains_like_one_process(model, reference, [optimizer, expected], range(3), data, microbatches)
    w13 = model.layers[0].mlp.w13.weight
    assert local_of(w13).numel() < w13.numel() / int(mesh["tp"]) + 1


def gradients() -> dict[str, torch.Tensor]:
    model = cut_decoder({"dp": 2, "tp": 2}, strategy="no_shard")
    loss_of(model, rows(0).chunk(2)[dist.get_rank() // 2]).backward()
    return {name: local_of(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def test_what_is_not_cut_has_the_same_gradient_on_all_ranks_of_the_axis(ranks: RankGroup) -> None:
    first, *others = ranks.run(WORLD, gradients)
    reference = decoder()
    loss_of(reference, rows(0)).backward()
    whole = [name for name, param in reference.named_parameters() if param.shape == first[name].shape]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in whole} == {
        *("attention_norm", "mlp_norm", "norm", "embed", "lm_head")
    }
    for name in whole:
        for other in others:
            assert torch.equal(first[name], other[name]), name
        torch.testing.assert_close(first[name], reference.get_parameter(name).grad, **EXACT)


def ends_cut(style: str) -> int:
    """The output layer, and the embedding, cut as well: what no rowwise module takes is made whole."""
    ends = (
        ParallelPolicy(("lm_head",), "tp", style),
        ParallelPolicy(("embed",), "tp", "rowwise" if style == "colwise" else "colwise"),
    )
    model, reference = cut_decoder({"dp": 2, "tp": 2}, *ends), decoder()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    assert_trains_like_one_process(model, reference, optimizers, range(2), 2)
    with torch_impl.count_collectives(model) as count:
        loss_of(model, rows(0).chunk(2)[dist.get_rank() // 2]).backward()
    return sum(calls for (unit, _), calls in count.calls_of.items() if unit == "activations")


@pytest.mark.fast_cases("rowwise")
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_embedding_and_output_layer_may_be_cut(ranks: RankGroup, style: str) -> None:
    # Two sums forward and two backward for each layer, and the ends' own: colwise, output gathered and input's
    # gradient summed, and the embedding's sum; rowwise, output summed and input's gradient gathered, and its gather.
    assert ranks.run(WORLD, ends_cut, style) == [4 * CONFIG.n_layers + 3] * WORLD


def saved(path: str, plain: str) -> dict[str, torch.Tensor]:
    model = cut_decoder({"dp": 2, "tp": 2})
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    assert_trains_like_one_process(model, *_reference(optimizer), range(2), 2)
    torch_impl.save_checkpoint(path, model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=plain)
    return {name: torch_impl.full_tensor(param).detach() for name, param in model.named_parameters()}


def _reference(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.optim.Optimizer]]:
    reference = decoder()
    return reference, [optimizer, torch.optim.AdamW(reference.parameters(), lr=1e-2)]


def continued(path: str, plain: str, mesh: dict[str, int | str]) -> None:
    """The two steps before the checkpoint by one process, the next two by both, from the checkpoint."""
    data = WORLD // int(mesh["tp"])
    model = cut_decoder(mesh)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    reference, optimizers = _reference(optimizer)
    for step in range(2):
        loss_of(reference, rows(step)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch_impl.load_checkpoint(path, model, optimizer)
    own = rows(9).chunk(data)[dist.get_rank() // (WORLD // data)]
    torch.testing.assert_close(loss_of(model, own), loss_of(reference, own), **EXACT)
    assert_trains_like_one_process(model, reference, optimizers, range(2, 4), data)
    other = cut_decoder(mesh)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    dcp.load({"model": other.state_dict()}, checkpoint_id=plain)
    torch_impl.load_checkpoint(path, model)
    for name, param in other.named_parameters():
        want = torch_impl.full_tensor(model.get_parameter(name))
        assert torch.equal(torch_impl.full_tensor(param), want), name


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_of_the_axis_is_loaded_on_one_two_and_four(
    ranks: RankGroup, tmp_path: Path
) -> None:
    path, plain = str(tmp_path / "ours"), str(tmp_path / "plain")
    values, *_ = ranks.run(WORLD, saved, path, plain)
    whole = {"model": {name: torch.zeros_like(param) for name, param in decoder().named_parameters()}}
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    for name, value in values.items():
        assert torch.equal(whole["model"][name], value), name
    for tp in (1, 2, 4):
        ranks.run(WORLD, continued, path, plain, {"dp": "all", "tp": tp})
