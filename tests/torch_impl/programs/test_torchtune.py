"""torchtune's own recipes, full and LoRA, with torch's ``fully_shard`` and with ours.

The recipe classes run as they are: model on the meta device, ``shard_model``, ``load_from_full_model_state_dict``,
accumulation, ``scale_grads``, clipping, checkpoints, resuming. Their model is small; tokenizer, data and logger are
this module's, by the configuration.

torchtune 0.6.1 needs torchao 0.13, which peft refuses. ``make test-programs`` therefore installs both into a folder of
their own, and has it on the path for this file only.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save
from torch.distributed.tensor import DTensor, distribute_tensor

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.frameworks import (
    Result,
    assert_equal_runs,
    assert_sharded,
    both,
    needs,
    run,
)

pytestmark = [pytest.mark.slow, needs("torchtune", advice="make test-programs installs it apart")]

SIZES = {
    "vocab_size": 67,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 24,
    "max_seq_len": 32,
    "intermediate_dim": 41,
}
# The blocks of a rank's part of NF4 weights are whole.
QUANTIZED_SIZES = SIZES | {"num_layers": 1, "embed_dim": 256, "intermediate_dim": 256}
FULL = {"_component_": "torchtune.models.llama3.llama3", **SIZES}
LORA = {
    "_component_": "torchtune.models.llama3.lora_llama3",
    **SIZES,
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}


class Tokenizer:
    """What the recipes ask of one."""

    pad_id = 0


class Rows(torch.utils.data.Dataset):
    """Rows of several lengths, few, so that they are learned; the recipe's sampler gives each rank some of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, 67, (length,), generator=generator).tolist() for length in range(6, 10)]

    def __len__(self) -> int:
        return 16 * dist.get_world_size()

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index % len(self.rows)]
        return {"tokens": row, "labels": row}


class Silent:
    """In the place of a metric logger."""

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: Any, step: int) -> None: ...

    def close(self) -> None: ...


def recipe_module(name: str) -> ModuleType:
    """Recipes are files beside the package, which forbids to import them as its modules."""
    import torchtune

    path = Path(torchtune.__file__).parent.parent / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(
    folder: str, seed: int, resumes: bool, model: dict[str, Any], options: dict[str, Any]
) -> Any:
    from omegaconf import OmegaConf

    here = __name__
    return OmegaConf.create(
        {
            "device": "cpu",
            "dtype": "fp32",
            "seed": seed,
            "epochs": 2,
            "max_steps_per_epoch": None,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "clip_grad_norm": 0.5,
            "shuffle": True,
            "resume_from_checkpoint": resumes,
            "output_dir": f"{folder}/out",
            "model": model,
            "tokenizer": {"_component_": f"{here}.Tokenizer"},
            "dataset": {"_component_": f"{here}.Rows"},
            "metric_logger": {"_component_": f"{here}.Silent"},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", "num_output_chunks": 2},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 1,
            },
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": f"{folder}/base",
                "checkpoint_files": ["model.pt"],
                "model_type": "LLAMA3",
                "output_dir": f"{folder}/out",
            },
            **options,
        }
    )


def drawn_alike(adapter: torch.nn.Linear) -> None:
    """FSDP2 draws each rank's shard by itself, so others than we do."""
    weight = adapter.weight
    values = torch.empty(weight.shape).uniform_(
        -0.2, 0.2, generator=torch.Generator().manual_seed(weight.numel())
    )
    if isinstance(weight, DTensor):
        values = distribute_tensor(values, weight.device_mesh, weight.placements)
    with torch.no_grad():
        weight.copy_(values)


def saved_before_training(*args: Any, **options: Any) -> Any:
    """torchtune saves in a thread by the group of the training, which gloo does not bear: torch's FSDP2 dies too."""
    saving = async_save(*args, **options)
    saving.result()
    return saving


class Run:
    def __init__(self, recipe: str, config: Any) -> None:
        module = recipe_module(recipe)
        self.losses: list[float] = []
        self.norms: list[float] = []
        classes = {
            "full_finetune_distributed": "FullFinetuneRecipeDistributed",
            "lora_finetune_distributed": "LoRAFinetuneRecipeDistributed",
        }
        with (
            # The process group is there, and torchtune knows the memory of accelerators only.
            mock.patch.object(module, "init_process_group"),
            mock.patch("torchtune.training.get_memory_stats"),
            mock.patch("torchtune.training.log_memory_stats"),
            mock.patch("torchtune.training.cleanup_before_training"),
            mock.patch("torchtune.modules.peft.lora._lora_a_init_params", drawn_alike),
            mock.patch("torchtune.training.checkpointing._checkpointer.async_save", saved_before_training),
            mock.patch.object(torch.nn.utils, "clip_grad_norm_", self._clip(torch.nn.utils.clip_grad_norm_)),
        ):
            self.recipe = getattr(module, classes[recipe])(config)
            self.recipe.setup(config)
            assert_sharded(self.recipe._model)
            self.recipe._loss_fn.register_forward_hook(
                lambda _, inputs, loss: self.losses.append(loss.item())
            )
            self.recipe.train()

    def _clip(self, clip: Any) -> Any:
        def clipped(*args: Any, **options: Any) -> torch.Tensor:
            norm = clip(*args, **options)
            self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
            return norm

        return clipped


def save_base(folder: str, model: dict[str, Any]) -> None:
    """The weights without adapters, of which a recipe starts."""
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    if dist.get_rank() == 0:
        base = Path(folder) / "base"
        base.mkdir(parents=True)
        torch.manual_seed(0)
        component = model["_component_"].replace(".lora_", ".")
        sizes = {"_component_": component, **{key: model[key] for key in SIZES}}
        torch.save(instantiate(OmegaConf.create(sizes)).state_dict(), base / "model.pt")
    dist.barrier()


def trained_and_resumed(folder: str, recipe: str, model: dict[str, Any], options: dict[str, Any]) -> Result:
    save_base(folder, model)
    first = Run(recipe, configuration(folder, 0, False, model, options))
    if dist.get_rank() == 0:
        # As if the run had ended after its first epoch.
        shutil.rmtree(f"{folder}/out/epoch_1")
    dist.barrier()
    config = configuration(folder, 0, True, model, options)
    if "lora" not in recipe and not config.get("enable_async_checkpointing"):
        config.checkpointer.checkpoint_files = ["epoch_0/model-00001-of-00001.bin"]
    again = Run(recipe, config)
    assert len(first.losses) == 2 * len(again.losses) > 0
    assert again.losses == first.losses[len(again.losses) :], "the resumed run goes on as the first one did"
    assert again.norms == first.norms[len(again.norms) :]
    # NF4 weights have no whole form.
    trained = {
        name: torch_impl.full_tensor(param).detach().clone()
        for name, param in first.recipe._model.named_parameters()
        if param.requires_grad
    }
    return Result(first.losses, first.norms, trained)


def job(folder: str, recipe: str, model: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    def program(folder: str) -> Result:
        return trained_and_resumed(folder, recipe, model, options)

    return both(program, folder, fresh=("torchtune",))


@pytest.mark.parametrize(
    ("recipe", "model", "options"),
    [
        pytest.param("full_finetune_distributed", FULL, {}, id="full"),
        pytest.param(
            "full_finetune_distributed",
            FULL,
            {
                "enable_activation_checkpointing": True,
                "optimizer_in_bwd": True,
                "clip_grad_norm": None,
                "gradient_accumulation_steps": 1,
            },
            id="optimizer-in-backward",
        ),
        pytest.param(
            "full_finetune_distributed",
            FULL,
            {
                "enable_async_checkpointing": True,
                "lr_scheduler": None,
                "fsdp_reshard_after_forward": False,
                "custom_sharded_layers": ["tok_embeddings", "output"],
            },
            id="async",
        ),
        pytest.param("lora_finetune_distributed", LORA, {}, id="lora"),
        pytest.param(
            "lora_finetune_distributed", LORA | QUANTIZED_SIZES | {"quantize_base": True}, {}, id="qlora"
        ),
    ],
)
def test_torchtune_s_recipes_train_save_and_resume(
    ranks: RankGroup, tmp_path: Path, recipe: str, model: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_equal_runs(ranks.run(2, job, str(tmp_path), recipe, model, options), learned=0.3)


def test_recipes_train_with_tensor_parallelism(ranks: RankGroup, tmp_path: Path) -> None:
    options = {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
        "clip_grad_norm": None,
    }
    sizes = FULL | {"intermediate_dim": 40, "vocab_size": 68}
    runs = ranks.run(4, job, str(tmp_path), "full_finetune_distributed", sizes, options)
    # The ranks of a tensor-parallel pair have the same data.
    assert_equal_runs(runs[::2], learned=0.3)
    assert_equal_runs(runs[1::2], learned=0.3)


def dora(folder: str) -> list[float]:
    def program(folder: str) -> list[float]:
        model = LORA | {"use_dora": True}
        save_base(folder, model)
        return Run("lora_finetune_distributed", configuration(folder, 0, False, model, {})).losses

    losses = run("torch", program, str(Path(folder) / "torch"), fresh=("torchtune",))
    with pytest.raises(RuntimeError, match=r"aten\.mm\.default is not supported .* use full_tensor\(\)"):
        run("torch_impl", program, str(Path(folder) / "torch_impl"), fresh=("torchtune",))
    return losses


def test_products_of_parameters_by_which_dora_begins_are_refused(ranks: RankGroup, tmp_path: Path) -> None:
    for losses in ranks.run(2, dora, str(tmp_path)):
        assert losses[0] - min(losses) > 0.3
