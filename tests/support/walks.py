"""Measure how far a reader walks: files, functions and returns on five paths through the running code.

    python -m tests.support.walks [WALK ...]

                files       files of the product with a function that runs
                functions   functions of the product that run, each counted once
                returns     times that the path comes back to a file that it left before

Only functions of `bridge`, `torch_impl` and `jax_impl` count, in all threads. Work before a walk, such as
imports and the sharding of a model, does not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(str(ROOT / name) + os.sep for name in ("bridge", "torch_impl", "jax_impl"))


@dataclass
class Walk:
    files: list[str] = field(default_factory=list)
    functions: set[tuple[str, int]] = field(default_factory=set)
    returns: int = 0
    _last: str = ""

    def step(self, frame: FrameType, event: str, argument: object) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        file = code.co_filename
        self.functions.add((file, code.co_firstlineno))
        if file != self._last:
            self.returns += file in self.files
            self._last = file
        if file not in self.files:
            self.files.append(file)

    def __str__(self) -> str:
        return f"{len(self.files):5} files {len(self.functions):5} functions {self.returns:6} returns"


@contextmanager
def walked(name: str, verbose: bool) -> Iterator[None]:
    """Print the files, functions and returns of the calls in the block."""
    walk = Walk()
    threading.setprofile(walk.step)
    sys.setprofile(walk.step)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # documented for sys.setprofile only, works here too
    print(f"{name:28}{walk}", flush=True)
    if verbose:
        print(*(f"    {Path(file).relative_to(ROOT)}" for file in walk.files), sep="\n", flush=True)


Walked = Callable[[str], Any]


def torch_training(walked: Walked) -> None:
    """Backward and optimizer step of two units and a root, on one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import torch_impl

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            torch_impl.fully_shard(layer)
        torch_impl.fully_shard(model)
        optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-3)
        for repeat in range(2):
            loss = model(torch.ones(2, 8)).sum()
            if not repeat:
                # The first step makes buffers and hooks.
                loss.backward()
                optimizer.step()
                continue
            with walked("torch: backward"):
                loss.backward()
            with walked("torch: optimizer.step"):
                optimizer.step()
        dist.destroy_process_group()


def jax_training(walked: Walked) -> None:
    """The first step of two units, which traces the step, and the next step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    import jax_impl

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(model: Net, batch: jax.Array) -> jax.Array:
        return jnp.mean(model(batch) ** 2)

    model = Net()
    plan, weights = jax_impl.fully_shard(model, jax_impl.data_parallel_mesh(1), units=["layers/*"])
    optimizer = jax_impl.main_weight_adamw(1e-3)
    state = jax_impl.init_state(plan, weights, optimizer)
    step = jax_impl.make_train_step(plan, loss, optimizer)
    batch = np.ones((8, 8), np.float32)
    with walked("jax: first step"):
        state, _ = step(state, batch)
    with walked("jax: later step"):
        state, _ = step(state, batch)


def conversion(walked: Walked) -> None:
    """Two tensors from DCP to Orbax."""
    import numpy as np

    from bridge import convert, create_checkpoint

    # Readers and writers of formats are imported at their first use, which would count as a walk through their files.
    from bridge.core.formats.dcp import reader  # noqa: F401
    from bridge.core.formats.orbax import writer as orbax_writer  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        with create_checkpoint(f"{folder}/a", "dcp") as writer:
            for name in ("a", "b"):
                tensor = writer.add_tensor(("model", name), (64, 32), np.dtype("float32"))
                for box in writer.chunks(tensor.name):
                    writer.write(tensor.name, box, np.ones(box.sizes, np.float32))
        with walked("convert"):
            convert(f"{folder}/a", f"{folder}/b", to="orbax")


def parity_of_two(walked: Walked) -> None:
    """Comparison of an MLP in both frameworks, up to the report."""
    import numpy as np
    import torch
    from flax import nnx

    from bridge.parity import parity

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(nnx.relu(self.up(x)))

    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    mapping = {
        "rule": [{"torch": f"{name}.weight : o i", "jax": f"{name}/kernel : i o"} for name in ("up", "down")]
        + [{"torch": f"{name}.bias", "jax": f"{name}/bias"} for name in ("up", "down")]
    }
    torch_model, jax_model = Twin(), Net()
    inputs = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    with walked("parity"):
        parity(torch_model, jax_model, inputs, mapping=mapping, weights="torch").summary()


def planned(walked: Walked) -> None:
    """The plan of a shipped model, made twice."""
    from bridge.planning import Workload, load_policy, make_plan, resolve_models

    model, policy = resolve_models("llama3-8b", ["torch"])["torch"], load_policy("fsdp")
    for name in ("plan: first", "plan: second"):
        with walked(name):
            print(
                "",
                end=str(make_plan(model, policy, 64, "torch", Workload(batch=1, length=4096)).at_rest.total)[
                    :0
                ],
            )


WALKS = {
    "torch": torch_training,
    "jax": jax_training,
    "convert": conversion,
    "parity": parity_of_two,
    "plan": planned,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walk", nargs="*", help=f"any of {', '.join(WALKS)}; default: all")
    parser.add_argument("--files", action="store_true", help="list the files in order of entry")
    arguments = parser.parse_args()
    for name in arguments.walk or WALKS:
        WALKS[name](lambda title: walked(title, arguments.files))


if __name__ == "__main__":
    main()
