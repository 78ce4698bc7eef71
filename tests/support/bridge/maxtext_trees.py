"""MaxText's own parameter trees, filled by MaxText's own conversion from Hugging Face's tensors.

This is a script for an environment with MaxText (`make maxtext`), which needs Python 3.12 and dozens of packages::

    .venv-maxtext/bin/python tests/support/bridge/maxtext_trees.py JOBS.json

JOBS.json has a list of jobs. ``model``: MaxText's name of the model. ``sizes``: sizes that differ from MaxText's file
of sizes. ``scan``: whether layers are scanned. ``config``: the config.json. ``source``: an .npz of all tensors by their
names on the Hub. ``target``: the .npz to write, by the paths of MaxText's tree.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-maxtext" / "bin" / "python"
BEFORE = ENVIRONMENT.parents[1] / "maxtext-0.2.4"
"""The folder of an older release, for PYTHONPATH."""

_SEPARATOR = "-"


def main(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        _run(job)


def _run(job: dict[str, Any]) -> None:
    # Imported here, so that tests can import this module without MaxText.
    import maxtext
    import numpy as np
    from maxtext.checkpoint_conversion import to_maxtext
    from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
    from maxtext.configs import pyconfig

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(
        ["tests", str(base)],
        model_name=job["model"],
        scan_layers=job["scan"],
        run_name="tests",
        override_model_config=True,
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        attention="dot_product",
        per_device_batch_size=1,
        max_target_length=8,
        **job["sizes"],
    )
    tree, _ = to_maxtext.get_maxtext_model_info(config)
    with np.load(job["source"]) as file:
        source = dict(file)
    names = PARAM_MAPPING[job["model"]](job["config"], config, job["scan"])
    hooks = HOOK_FNS[job["model"]](job["config"], config, job["scan"], saving_to_hf=False)
    made: dict[str, Any] = {}
    for listed, there in names.items():
        key = listed
        if isinstance(key, str) and (own := key.replace("params-", "MoEBiasVar-", 1)) in tree:
            key = own  # No longer a parameter, but MaxText's table still has it.
        if any(part not in tree for part in (key if isinstance(key, tuple) else (key,))):
            continue  # MaxText's table has tensors of all variants, such as biases.
        _, shapes = to_maxtext._get_maxtext_indices_and_shapes(key, tree)
        hook = hooks.get(listed)
        # By the name "MoeBlock" it would stack the routers of Mixtral's layers along another axis than the tree's.
        name = "" if "MoeBlock" in key and key == listed else key
        load = to_maxtext._get_hf_loading_function(there, source.__getitem__, hook, shapes, config, name)
        array = np.asarray(load())
        parts = {key: array} if isinstance(key, str) else {k: array[..., n] for n, k in enumerate(key)}
        made |= {name.replace(_SEPARATOR, "/"): part for name, part in parts.items()}
    expected = {name.replace(_SEPARATOR, "/"): shape for name, (_, shape) in tree.items()}
    made_shapes = {name: array.shape for name, array in made.items()}
    assert made_shapes == expected, sorted(made_shapes.items() ^ expected.items())
    np.savez(job["target"], **made)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(json.loads(Path(sys.argv[1]).read_text()))
