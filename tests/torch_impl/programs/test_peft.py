"""LoRA of peft over a frozen bfloat16 base, with torch's ``fully_shard`` and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    accelerate_on_cpus,
    assert_equal_runs,
    assert_sharded,
    both,
    llama,
    needs,
    tokens,
)

pytestmark = [pytest.mark.slow, needs("accelerate", "peft", "transformers")]


def adapted(seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = llama(seed).to(torch.bfloat16)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(base, config)
    dtypes = {(param.requires_grad, param.dtype) for param in model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    return model


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch_impl.full_tensor(param).detach().clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def assert_base_kept(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """The frozen base has its values and 2 bytes an element; an even share of them within a row."""
    stored = 0
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.dtype == torch.bfloat16
            assert torch.equal(torch_impl.full_tensor(param), before[name])
            local = param.to_local()
            stored += local.nbytes
    total = sum(2 * tensor.numel() for name, tensor in before.items() if "lora" not in name)
    assert stored < 0.75 * total, "on two ranks"


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any = None
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(5):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        (loss.backward if backward is None else lambda loss=loss: backward(loss))()
        norm = nn.utils.clip_grad_norm_([param for param in model.parameters() if param.requires_grad], 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def by_hand(folder: str) -> Result:
    from torch.distributed.fsdp import fully_shard

    model = adapted(0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert_sharded(model)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    losses, norms = steps(model, optimizer)
    assert_base_kept(model, before)
    adapter_weights = adapters(model)
    with model.disable_adapter():
        ids = tokens(0)
        # Compared first, so that the last loss is one of training.
        losses.insert(0, model(input_ids=ids, labels=ids).loss.item())
    save_and_load_adapter(model, folder, adapter_weights)
    return Result(losses, norms, adapter_weights)


def save_and_load_adapter(model: nn.Module, folder: str, expected: dict[str, torch.Tensor]) -> None:
    from peft import PeftModel

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        loaded = PeftModel.from_pretrained(llama(0).to(torch.bfloat16), folder)
        named = dict(loaded.named_parameters())
        for name, adapter in expected.items():
            torch.testing.assert_close(named[name].detach(), adapter, rtol=0, atol=0)
    dist.barrier()


def by_accelerate(folder: str) -> Result:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with accelerate_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=True,
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        before = {name: param.detach().clone() for name, param in adapted(0).named_parameters()}
        model = adapted(dist.get_rank())
        optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert_sharded(model)
        losses, norms = steps(model, optimizer, accelerator.backward)
        assert_base_kept(model, before)
        return Result(losses, norms, adapters(model))


def job(folder: str, prepared: str) -> list[Any]:
    return both({"by hand": by_hand, "by accelerate": by_accelerate}[prepared], folder)


@pytest.mark.parametrize("prepared", ["by hand", "by accelerate"])
def test_lora_trains_over_a_frozen_bfloat16_base(ranks: RankGroup, tmp_path: Path, prepared: str) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path), prepared), learned=0.05)
