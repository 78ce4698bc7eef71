"""Measure time and memory of a comparison of two models, start-up included. Each comparison runs in its own process.

The line of each stage shows the wall seconds and the CPU seconds at its end, without start-up, and the largest memory
during the stage: anonymous memory, which a machine must have, and resident memory, whose mapped files the system can
drop. On a shared machine compare CPU seconds.

"tiny" is the Llama of the tests (3 layers, width 32). "gpt2" has the sizes of the 124 M model, with random weights, in
transformers and in ``jax_impl.models.CausalLM``. Neither downloads anything.

    python -m tests.bench.bench_parity
    python -m tests.bench.bench_parity --only tiny --steps 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = ("tiny", "gpt2")
ROWS, LENGTH = 2, 33


def gpt2_pair() -> tuple[Any, Any, Any, Any, dict[str, int]]:
    """Both models, the batch, the mapping and its axes."""
    import numpy as np
    import transformers
    from flax import nnx

    from bridge.core.mapping import load_mapping
    from jax_impl.models import CausalLM
    from jax_impl.models.causal_lm_config import CausalLMConfig

    config = transformers.GPT2Config()
    config._attn_implementation = "eager"
    torch_model = transformers.GPT2LMHeadModel(config).eval()
    jax_model = CausalLM(CausalLMConfig.from_hf(config.to_dict()), rngs=nnx.Rngs(0))
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH))
    return torch_model, jax_model, batch, load_mapping("gpt2"), {"d": config.n_embd // config.n_head}


class Peaks:
    """Largest anonymous and resident memory of this process in GB, overall and since the last call of ``stage``."""

    def __init__(self) -> None:
        self.all = self._now = (0.0, 0.0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Sample memory every 50 ms inside the ``with`` block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                self._look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look(self) -> None:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
        )
        sizes = tuple(int(status[name].split()[0]) * 1024 / 1e9 for name in ("RssAnon", "VmRSS"))
        self._now = (max(self._now[0], sizes[0]), max(self._now[1], sizes[1]))
        self.all = (max(self.all[0], sizes[0]), max(self.all[1], sizes[1]))

    def stage(self) -> tuple[float, float]:
        peak, self._now = self._now, (0.0, 0.0)
        return peak


def compare(size: str, steps: int) -> None:
    """Run one comparison in this process. Print the summary, and seconds and memory of each stage (Linux)."""
    from bridge.parity import parity

    if size == "gpt2":
        torch_model, jax_model, batch, mapping, axes = gpt2_pair()
    else:
        from tests.support.parity.pairs import build

        pair = build("llama", 0)
        torch_model, jax_model, batch = pair.torch_model, pair.jax_model, pair.batch
        mapping, axes = pair.mapping, dict(pair.axes)
    begun, used = time.monotonic(), time.process_time()
    peaks = Peaks()
    stages = ["start"]

    def say(text: str) -> None:
        anonymous, resident = peaks.stage()
        ended, busy = time.monotonic() - begun, time.process_time() - used
        print(
            f"  {ended:6.1f} s  {busy:6.1f} s CPU  {anonymous:5.2f} GB  {resident:5.2f} GB  {stages[-1]}",
            flush=True,
        )
        stages.append(text)

    with peaks.measured():
        report = parity(
            torch_model,
            jax_model,
            batch,
            mapping=mapping,
            axes=axes,
            loss="next_token",
            weights="torch",
            steps=steps,
            progress=say,
        )
        say("")
    print(f"  {report.summary()}")
    anonymous, resident = peaks.all
    print(
        f"  {time.monotonic() - begun:.1f} s without start-up; at most {anonymous:.2f} GB anonymous, {resident:.2f} GB "
        "resident"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--here", action="store_true", help="run in this process")
    options = parser.parse_args()
    for size in (options.only,) if options.only else SIZES:
        if options.here:
            compare(size, options.steps)
            continue
        print(size, flush=True)
        begun = time.monotonic()
        arguments = ["--here", "--only", size, "--steps", str(options.steps)]
        subprocess.run([sys.executable, "-m", "tests.bench.bench_parity", *arguments], check=True)
        print(f"  {time.monotonic() - begun:.1f} s with start-up\n", flush=True)


if __name__ == "__main__":
    main()
