"""Run the models and optimizers of one torchtitan release on a CPU.

This is a script, because a process can import only one release::

    python tests/support/torch_impl/torchtitan_runs.py RELEASE FAMILY FOLDER

The model trains and is saved like torchtitan's checkpoint manager does. The checkpoint goes to JAX's names and back,
and to Hugging Face's names. Training continues from the converted checkpoint. Prints ``ok`` at the end.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import open_checkpoint

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, LATENT = 67, 32, 4, 2, 8, 16
LAYERS, EXPERTS, CHOSEN, HIDDEN = 3, 4, 2, 16
GROUPED_ATTENTION = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "head_dim": HEAD,
}
LATENT_ATTENTION = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
AXES = {
    "qwen3": {"d": HEAD, "r": HEADS // GROUPS},
    "qwen3_moe": {"d": HEAD, "r": HEADS // GROUPS},
    "deepseek_v3": {"nope": 6, "rope": 4, "v": 5},
}
CONVENTIONS = {"0.2": "torchtitan_0_2", "0.3": "torchtitan"}
OF_ITS_OWN = "*.moe.expert_bias*"
"""The experts' biases, which torchtitan does not write for Hugging Face's Qwen 3 MoE."""


def model_0_2(family: str) -> tuple[nn.Module, Any, Any]:
    """A model, its sizes, and the class of its adapter, of torchtitan 0.2."""
    histc = torch.histc
    # torch counts whole numbers on GPUs only.
    torch.histc = lambda values, *args, **sizes: histc(values.float(), *args, **sizes).long()
    from torchtitan.models.moe import MoEArgs

    experts = MoEArgs(num_experts=EXPERTS, top_k=CHOSEN, use_grouped_mm=False, num_shared_experts=0)
    if family == "deepseek_v3":
        from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
        from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
        from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

        experts.num_shared_experts = 1
        sizes = DeepSeekV3ModelArgs(
            vocab_size=VOCABULARY,
            max_seq_len=10,
            inter_dim=24,
            moe_inter_dim=HIDDEN,
            moe_args=experts,
            **LATENT_ATTENTION,
        )
        sizes.moe_impl = "standard"
        model: Any = DeepSeekV3Model(sizes)
        adapter: Any = DeepSeekV3StateDictAdapter
    else:
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model
        from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

        sizes = Qwen3ModelArgs(
            vocab_size=VOCABULARY,
            hidden_dim=24,
            max_seq_len=10,
            moe_enabled=family == "qwen3_moe",
            moe_inter_dim=HIDDEN,
            moe_args=experts,
            **GROUPED_ATTENTION,
        )
        sizes.moe_impl = "standard"
        model, adapter = Qwen3Model(sizes), Qwen3StateDictAdapter
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    return model, sizes, adapter


def model_0_3(family: str, *, fused: bool) -> tuple[nn.Module, Any, Any]:
    """The same for torchtitan 0.3, with its attention for CPUs."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.nn_modules import RMSNorm

    package = importlib.import_module(f"torchtitan.models.{family.removesuffix('_moe')}")
    package.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    normal = {"weight": lambda weight: nn.init.normal_(weight, std=0.2)}
    ends = {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=normal),
        "norm": RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_}),
        "lm_head": Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=normal),
    }
    if family == "deepseek_v3":
        layers = package._build_dsv3_layers(
            n_dense_layers=1,
            mscale=1.0,
            dense_hidden_dim=24,
            moe_hidden_dim=HIDDEN,
            num_experts=EXPERTS,
            num_shared_experts=1,
            router_top_k=CHOSEN,
            router_score_func="sigmoid",
            attn_backend="",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=ComplexRoPE.Config(dim=4, max_seq_len=10, theta=300.0),
            **LATENT_ATTENTION,
        )
        config = package.DeepSeekV3Model.Config(layers=layers, **ends)
        adapter = package.state_dict_adapter.DeepSeekV3StateDictAdapter
    else:
        sizes = {
            "fuse_qkv": fused,
            "attn_backend": "",
            "rope": CosSinRoPE.Config(dim=HEAD, max_seq_len=10, theta=300.0),
            **GROUPED_ATTENTION,
        }
        if family == "qwen3_moe":
            layers = package._build_qwen3_moe_layers(
                moe_hidden_dim=HIDDEN,
                num_experts=EXPERTS,
                top_k=CHOSEN,
                moe_comm_backend="standard",
                **sizes,
            )
        else:
            layers = package._build_qwen3_layers(hidden_dim=24, **sizes)
        config = package.Qwen3Model.Config(layers=layers, **ends)
        adapter = package.state_dict_adapter.Qwen3StateDictAdapter
    model = config.build()
    model.init_states()
    return model, config, adapter


class Run:
    """A model of torchtitan and its container of optimizers."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Any, Any]], seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.sizes, self.adapter = make()
        for name, buffer in self.model.named_buffers():
            # Of a longer run; its updates need process groups.
            if "expert_bias" in name:
                buffer.copy_(torch.rand(buffer.shape))
        self.optimizers = _optimizers(self.model)

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            ids = torch.randint(0, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(step))
            self.optimizers.zero_grad()
            logits = self.model(ids)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            self.optimizers.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """The state as in torchtitan's checkpoint manager, with the model's tensors at the root."""
        return {**self.model.state_dict(), "optimizer": self.optimizers.state_dict()}

    def by_its_adapter(self, key: str = "") -> dict[str, torch.Tensor]:
        """Hugging Face's names as torchtitan writes them: of the weights, or of what the optimizer keeps of each."""
        holder = copy.deepcopy(self.model)
        kept = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        with torch.no_grad():
            for parameter, own in zip(holder.parameters(), self.model.parameters(), strict=True):
                parameter.copy_(kept[own][key] if key else own)
        # torchtitan splits fused weights when it saves them.
        tensors = self.adapter(self.sizes, None).to_hf(holder.state_dict())
        buffers = {"e_score_correction_bias"} if key else set()
        return {name: x.detach().clone() for name, x in tensors.items() if name.split(".")[-1] not in buffers}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})
        self.optimizers.load_state_dict(state["optimizer"])


def _optimizers(model: nn.Module) -> Any:
    from torchtitan.components import optimizer

    if hasattr(optimizer, "default_adamw"):
        return optimizer.default_adamw(1e-2, implementation="foreach").build(model_parts=[model])
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims

    config = JobConfig()
    config.optimizer.lr = 1e-2
    config.optimizer.implementation = "foreach"
    return optimizer.build_optimizers([model], config.optimizer, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1))


def main(release: str, family: str, folder: Path) -> None:
    fused = not family.endswith("_unfused")
    family = family.removesuffix("_unfused")
    convention = CONVENTIONS[release] + ("" if fused else "_unfused")

    def make() -> tuple[nn.Module, Any, Any]:
        return model_0_2(family) if release == "0.2" else model_0_3(family, fused=fused)

    run = Run(make, 0)
    run.steps(0, 3)
    titan, axes = folder / "titan", AXES[family]
    dcp.save(run.state(), checkpoint_id=titan, no_dist=True)
    by_torchtitan = run.by_its_adapter()
    for key in ("exp_avg", "exp_avg_sq"):
        moments = run.by_its_adapter(key)
        by_torchtitan |= {f"optimizer.state.{name}.{key}": tensor for name, tensor in moments.items()}
    expected = run.steps(3, 6)

    convert(titan, folder / "jax", to="orbax", mapping=family, into="jax", axes=axes)
    convert(folder / "jax", folder / "back", to="dcp", mapping=family, into=convention, axes=axes)
    report = diff(titan, folder / "back")
    assert report.within, report
    again = Run(make, 7)
    again.steps(0, 1)
    again.load(folder / "back")
    assert again.steps(3, 6) == expected

    hf = "torch" if family == "qwen3" else "hf"
    left = Selection(drop=(OF_ITS_OWN,)) if family == "qwen3_moe" else Selection()
    convert(titan, folder / "hf", to="safetensors", mapping=family, into=hf, axes=axes, selection=left)
    with open_checkpoint(folder / "hf") as reader:
        names = {name for name in reader.tensors if not name.endswith(".step")}
        assert names == by_torchtitan.keys(), names ^ by_torchtitan.keys()
        for name, tensor in by_torchtitan.items():
            assert torch.equal(torch.from_numpy(reader.read(name)), tensor), name
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
