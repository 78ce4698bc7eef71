"""torchtitan's model, parallelization, optimizer, clipping and checkpoints, with torch's ``fully_shard`` and ours.

torchtitan's trainer needs CUDA. The program does what the trainer does, in its order, with torchtitan's own parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    assert_equal_runs,
    assert_sharded,
    both,
    needs,
    tokens,
    whole,
)

pytestmark = [pytest.mark.slow, needs("torchtitan", "triton")]


class Position:
    """In the place of a data loader: what the next step is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Run:
    def __init__(self, folder: str, async_mode: str, compiles: bool, seed: int) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.lr_scheduler import build_lr_schedulers
        from torchtitan.components.optimizer import build_optimizers
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        config = JobConfig()
        config.training.seq_len = 10
        config.training.steps = 10
        config.training.mixed_precision_param = "float32"
        config.activation_checkpoint.mode = "selective"
        config.activation_checkpoint.selective_ac_option = "op" if compiles else "1"
        config.compile.enable = compiles
        config.compile.components = ["model"]
        config.compile.backend = "aot_eager"
        config.optimizer.lr = 1e-2
        config.optimizer.implementation = "foreach"
        config.lr_scheduler.warmup_steps = 2
        config.checkpoint.enable = True
        config.checkpoint.enable_ft_dataloader_checkpoints = False
        config.checkpoint.interval = 3
        config.checkpoint.async_mode = async_mode
        config.checkpoint.keep_latest_k = 0
        sizes = TransformerModelArgs(
            dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=67, multiple_of=1, max_seq_len=10
        )
        dims = ParallelDims(1, dist.get_world_size(), 1, 1, 1, 1, 1, dist.get_world_size())
        with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
            with torch.device("meta"):
                model = Transformer(sizes)
            self.model = parallelize_llama(model, dims, config)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.model.train()
        assert_sharded(self.model)
        for module in self.model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                # gloo has no reduction that divides.
                module.set_force_sum_reduction_for_comms(True)
        # FSDP2 draws others on every number of ranks.
        torch.manual_seed(seed)
        first = Transformer(sizes)
        with torch.no_grad():
            first.init_weights()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = first.state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(self.model, state, options=options)
        self.optimizers = build_optimizers([self.model], config.optimizer, dims)
        self.schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.position = Position()
        self.checkpointer = CheckpointManager(
            dataloader=self.position,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            checkpoint_config=config.checkpoint,
            sd_adapter=None,
            base_folder=folder,
        )

    def steps(self, until: int) -> tuple[list[float], list[float]]:
        from torchtitan.distributed.utils import clip_grad_norm_

        losses, norms = [], []
        while self.position.step < until:
            ids = tokens(self.position.step, rows=4)
            self.optimizers.zero_grad()
            # Sums over all tokens: torchtitan turns off FSDP2's own division.
            count = ids[:, 1:].numel() * dist.get_world_size()
            for part in ids.chunk(2):
                logits = self.model(part)[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
                (loss / count).backward()
                losses.append(loss.item() / part[:, 1:].numel())
            norms.append(clip_grad_norm_(self.model.parameters(), 0.5).item())
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.position.step += 1
            self.checkpointer.save(self.position.step)
        return losses, norms

    def close(self) -> None:
        self.checkpointer._async_wait()
        self.checkpointer.close()


def trained_and_resumed(folder: str, async_mode: str, compiles: bool) -> Result:
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch._dynamo.reset()
    run = Run(folder, async_mode, compiles, seed=0)
    losses, norms = run.steps(3)
    straight = run.steps(5)
    weights = whole(run.model)
    run.close()
    dist.barrier()
    again = Run(folder, async_mode, compiles, seed=7)
    assert again.checkpointer.load(step=3)
    assert again.position.step == 3
    assert again.steps(5) == straight, "the resumed run goes on as the first one did"
    again.close()
    return Result(losses + straight[0], norms + straight[1], weights)


def job(folder: str, async_mode: str, compiles: bool) -> list[Any]:
    def program(folder: str) -> Result:
        return trained_and_resumed(folder, async_mode, compiles)

    return both(program, folder, fresh=("torchtitan",))


@pytest.mark.parametrize(
    ("async_mode", "compiles"),
    [pytest.param("disabled", True, id="compiled"), pytest.param("async", False, id="async")],
)
def test_torchtitan_parallelizes_trains_saves_and_loads(
    ranks: RankGroup, tmp_path: Path, async_mode: str, compiles: bool
) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path), async_mode, compiles), learned=0.3)
