"""Run MaxText's own training loop and checkpoint manager for a small float32 Llama on the CPU.

This is a script for MaxText's environment (`make maxtext`)::

    .venv-maxtext/bin/python tests/support/bridge/maxtext_training.py FOLDER RUN STEPS

The script continues from FOLDER/RUN/checkpoints, if there are any, to STEPS steps, and saves every second step there.
It writes the losses to FOLDER/RUN.jsonl, one line per step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HEAD = 4
SIZES = {
    "decoder_block": "llama2",
    "base_emb_dim": 32,
    "base_num_decoder_layers": 2,
    "head_dim": HEAD,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 24,
    "vocab_size": 64,
}
OPTIONS = {
    "dataset_type": "synthetic",
    "max_target_length": 16,
    "per_device_batch_size": 2,
    "dtype": "float32",
    "attention": "dot_product",
    "learning_rate": 0.01,
    # By default the schedule ends with the run.
    "learning_rate_schedule_steps": 20,
    "enable_checkpointing": "true",
    "async_checkpointing": "false",
    "checkpoint_period": 2,
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "enable_goodput_recording": "false",
    "monitor_goodput": "false",
    "enable_tensorboard": "false",
    "log_config": "false",
}


def main(folder: str, run: str, steps: str) -> None:
    # Imported here, so that tests can import this module without MaxText.
    import maxtext
    from maxtext.trainers.pre_train import train

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    own = {"run_name": run, "base_output_directory": folder, "steps": steps}
    own |= {"metrics_file": f"{folder}/{run}.jsonl"}
    train.main(["train", str(base), *(f"{k}={v}" for k, v in {**SIZES, **OPTIONS, **own}.items())])


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(*sys.argv[1:])
