"""Checkpoints of torchtitan's own model and optimizer, by its own adapter and through the bridge to flax and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from tests.support.torch_impl.frameworks import needs

pytestmark = [pytest.mark.slow, needs("torchtitan", "triton")]

VOCABULARY, HEAD = 67, 6


class Run:
    """torchtitan 0.2's Llama with grouped queries, and its container of optimizers."""

    def __init__(self, seed: int) -> None:
        from torchtitan.components.optimizer import build_optimizers
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        torch.manual_seed(seed)
        self.sizes = TransformerModelArgs(
            dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=1, max_seq_len=10
        )
        self.model = Transformer(self.sizes)
        with torch.no_grad():
            self.model.init_weights()
        config = JobConfig()
        config.optimizer.lr = 1e-2
        config.optimizer.implementation = "foreach"
        dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
        self.optimizers = build_optimizers([self.model], config.optimizer, dims)

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            ids = torch.randint(0, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(step))
            self.optimizers.zero_grad()
            logits = self.model(ids)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            self.optimizers.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """As torchtitan's checkpoint manager has it: the model's tensors at the root."""
        return {**self.model.state_dict(), "optimizer": self.optimizers.state_dict()}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})
        self.optimizers.load_state_dict(state["optimizer"])


def test_training_goes_on_after_a_way_through_flax_and_through_hugging_faces_names(tmp_path: Path) -> None:
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    run = Run(0)
    run.steps(0, 3)
    dcp.save(run.state(), checkpoint_id=tmp_path / "titan", no_dist=True)
    by_torchtitan = Llama3StateDictAdapter(run.sizes, None).to_hf(run.model.state_dict())
    by_torchtitan = {name: tensor.detach().clone() for name, tensor in by_torchtitan.items()}
    expected = run.steps(3, 6)
    for into, to in (("flax", "orbax"), ("hf", "safetensors")):
        there, back = tmp_path / into, tmp_path / f"back_from_{into}"
        convert(tmp_path / "titan", there, to=to, mapping="llama", into=into, axes={"d": HEAD})
        convert(there, back, to="dcp", mapping="llama", into="torchtitan_0_2", axes={"d": HEAD})
        assert diff(tmp_path / "titan", back).within
        again = Run(7)
        again.steps(0, 1)
        again.load(back)
        assert again.steps(3, 6) == expected
    with open_checkpoint(tmp_path / "hf") as reader:
        for name, tensor in by_torchtitan.items():
            assert torch.equal(torch.from_numpy(reader.read(name)), tensor), name
