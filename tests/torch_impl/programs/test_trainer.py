"""A run of transformers' Trainer through accelerate's FSDP2 plugin, with torch's ``fully_shard`` and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    accelerate_on_cpus,
    assert_equal_runs,
    assert_sharded,
    both,
    llama,
    needs,
    whole,
)

pytestmark = [pytest.mark.slow, needs("accelerate", "transformers")]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Few rows, so that they are learned; the Trainer hands every rank others."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 67, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def trained(folder: str) -> Result:
    """Losses of this rank: the Trainer logs their mean over the ranks."""
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class Recording(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **options)
            losses.append(loss.item())
            return loss

    def trainer(steps: int) -> Recording:
        arguments = TrainingArguments(
            output_dir=folder,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_ram_efficient_loading": True,
                "state_dict_type": "SHARDED_STATE_DICT",
                "activation_checkpointing": True,
            },
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_steps=steps,
            save_steps=4,
            save_total_limit=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        return Recording(model=llama(dist.get_rank()), args=arguments, train_dataset=Rows())

    with accelerate_on_cpus():
        first = trainer(6)
        first.train()
        assert_sharded(first.model)
        weights = whole(first.model)
        straight = list(losses)
        norms = [entry["grad_norm"] for entry in first.state.log_history if "grad_norm" in entry]
        losses.clear()
        second = trainer(6)
        second.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
        assert losses == straight[-len(losses) :], "the resumed run goes on as the first one did"
        for name, weight in whole(second.model).items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
        first.save_model(str(Path(folder) / "whole"))
    return Result(straight, norms, weights)


def job(folder: str) -> list[Any]:
    return both(trained, folder)


def test_the_trainer_trains_saves_and_resumes(ranks: RankGroup, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path)), learned=0.3)
