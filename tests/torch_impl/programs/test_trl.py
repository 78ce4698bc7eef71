"""DPO by TRL, whose reference model TRL shards itself, with torch's ``fully_shard`` and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

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

pytestmark = [pytest.mark.slow, needs("accelerate", "datasets", "transformers", "trl")]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)} | {"[unk]": 64, "[pad]": 65, "[eos]": 66}
    plain = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[unk]", pad_token="[pad]", eos_token="[eos]"
    )


def preferences() -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(f"w{number}" for number in torch.randint(0, 64, (length,), generator=generator))

    rows = [{"prompt": text(4), "chosen": text(5), "rejected": text(3 + row % 3)} for row in range(8)]
    return Dataset.from_list(rows)


def trained(folder: str) -> Result:
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Recording(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **options)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    with accelerate_on_cpus():
        config = DPOConfig(
            output_dir=folder,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "cpu_ram_efficient_loading": True,
                "state_dict_type": "SHARDED_STATE_DICT",
            },
            per_device_train_batch_size=2,
            # A loss near 0 has the rounding of its margin as relative error; none comes near with this rate.
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            max_steps=5,
            save_strategy="no",
            logging_steps=1,
            beta=0.5,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        # TRL loads the reference on every rank; the policy is that of rank 0.
        trainer = Recording(
            model=llama(dist.get_rank()),
            ref_model=llama(0),
            args=config,
            train_dataset=preferences(),
            processing_class=tokenizer(),
        )
        trainer.train()
        assert_sharded(trainer.model)
        reference = trainer.ref_model
        assert isinstance(reference, nn.Module)
        assert_sharded(reference)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert all(
            torch.equal(param, plain_param)
            for param, plain_param in zip(whole(reference).values(), plain(0), strict=True)
        )
        return Result(losses, norms, whole(trainer.model))


def plain(seed: int) -> list[torch.Tensor]:
    return [param.detach() for param in llama(seed).parameters()]


def job(folder: str) -> list[Any]:
    return both(trained, folder, fresh=("trl",))


def test_dpo_trains_beside_a_reference_model(ranks: RankGroup, tmp_path: Path) -> None:
    runs = ranks.run(2, job, str(tmp_path))
    for result in runs[0] + runs[1]:
        # The policy starts as the reference, so the first loss is the same for all data.
        assert result.losses.pop(0) == pytest.approx(0.6931, abs=1e-3)
    # A loss depends on differences of sums of some 30 log-probabilities of about -4, which float32 rounds by 1e-5:
    # on one processor the losses differed by 1.2e-6, while gradients' norms agreed to 4e-7.
    assert_equal_runs(runs, learned=0.0, rounding=5e-6)
