"""How long a comparison of two models takes, start-up included, and how much memory, each in a process of its own.

"tiny" is the Llama of the tests (3 layers, width 32); "gpt2" has the sizes of the 124 M model, with random weights, in
transformers and in ``jax_impl.models.CausalLM``. Neither downloads anything.

    python -m tests.bench.bench_parity
    python -m tests.bench.bench_parity --only tiny --steps 3
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import Any

SIZES = ("tiny", "gpt2")
ROWS, LENGTH = 2, 33


def gpt2_pair() -> tuple[Any, Any, Any, Any, dict[str, int]]:
    """Both models, the batch, the mapping and its axes."""
    import numpy as np
    import transformers
    from flax import nnx

    from bridge.mapping import load_mapping
    from jax_impl.models import CausalLM
    from jax_impl.models.causal_lm_config import CausalLMConfig

    config = transformers.GPT2Config()
    config._attn_implementation = "eager"
    torch_model = transformers.GPT2LMHeadModel(config).eval()
    jax_model = CausalLM(CausalLMConfig.from_hf(config.to_dict()), rngs=nnx.Rngs(0))
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH))
    return torch_model, jax_model, batch, load_mapping("gpt2"), {"d": config.n_embd // config.n_head}


def compare(size: str, steps: int) -> None:
    """One comparison, in this process; prints the summary, seconds without start-up and the largest memory."""
    from bridge.parity import parity

    if size == "gpt2":
        torch_model, jax_model, batch, mapping, axes = gpt2_pair()
    else:
        from tests.support.parity.pairs import build

        pair = build("llama", 0)
        torch_model, jax_model, batch = pair.torch_model, pair.jax_model, pair.batch
        mapping, axes = pair.mapping, dict(pair.axes)
    begun = time.monotonic()
    report = parity(
        torch_model,
        jax_model,
        batch,
        mapping=mapping,
        axes=axes,
        loss="next_token",
        weights="torch",
        steps=steps,
        progress=lambda text: print(f"  {time.monotonic() - begun:6.1f} s  {text}", flush=True),
    )
    print(f"  {report.summary()}")
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"  {time.monotonic() - begun:.1f} s without start-up, {gigabytes:.1f} GB at most")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--steps", type=int, default=3, help="of training")
    parser.add_argument("--here", action="store_true", help="in this process")
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
