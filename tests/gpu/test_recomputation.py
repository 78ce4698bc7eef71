"""Units that recompute, and blocks that torch.compile compiles, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_impl
from bridge.planning import parse_policy
from tests.gpu.devices import DEVICE, needs_device, needs_gpu
from tests.gpu.networks import Network, adamw, loss_of, network, rows, same_bits, sharded, train, values
from torch_impl import ShardingPolicy


def by_policy(recompute: object, **sizes: int) -> Network:
    text = f'[[unit]]\nmatch = "layers.*"\nrecompute = {recompute}\n[[unit]]\nmatch = ""\n'
    policy: ShardingPolicy = parse_policy(text, "test")
    return ShardingPolicy.parse(policy.to_toml(), "test").apply(network(**sizes), device_type=DEVICE)


@needs_device
@pytest.mark.parametrize("recompute", ["true", '"dots_saveable"'])
def test_units_that_recompute_have_the_bits_of_those_that_keep(one_rank: None, recompute: str) -> None:
    plain, model = by_policy("false"), by_policy(recompute)
    assert train(model, adamw(model)) == train(plain, adamw(plain))
    assert same_bits(values(model), values(plain))


class Checkpointed(Network):
    """Recomputes by torch's own checkpoint, around each unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.output(x)


@needs_device
def test_torchs_checkpoint_around_units_has_the_bits_of_no_checkpoint(one_rank: None) -> None:
    plain, model = sharded(), sharded(Checkpointed().to(DEVICE))
    assert train(model, adamw(model)) == train(plain, adamw(plain))
    assert same_bits(values(model), values(plain))


def activations(model: Network, width: int) -> int:
    gc.collect()
    x = rows(0, 16384, width)
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, x).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@needs_gpu
def test_recomputed_layers_take_less_memory(one_rank: None) -> None:
    kept, recomputed = (
        activations(by_policy(again, width=512, layers=12), 512) for again in ("false", "true")
    )
    print(f"kept {kept / 1e6:.0f} MB, recomputed {recomputed / 1e6:.0f} MB")
    assert recomputed < 0.6 * kept


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_device
@pytest.mark.parametrize("compiled_first", [True, False])
def test_layers_compiled_by_inductor_train_as_uncompiled_ones(
    one_rank: None, fresh_compiler: None, compiled_first: bool
) -> None:
    plain, model = sharded(), network()
    # Kernels of the GPU's, by triton: C++ for a CPU takes long to compile.
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    for layer in model.layers:
        if compiled_first:
            layer.compile(backend=backend)
        torch_impl.fully_shard(layer)
        if not compiled_first:
            layer.compile(backend=backend)
    torch_impl.fully_shard(model)
    expected = train(plain, adamw(plain))
    torch.testing.assert_close(train(model, adamw(model)), expected, rtol=1e-4, atol=0)
