"""Byte-level tokens of text that every Python installation has: the source files of the standard library.

    abc.py                 argparse.py                  ...              zipimport.py
    [bytes ... bytes][256][bytes ............... bytes][256]     ...    [bytes ... bytes]
    |<------------------------- train split: first 90 % ------------------>|<- held out ->|

The batch of a step depends only on (seed, step), so any number of ranks in either framework sees the same global
batch, and the position in the data is one integer.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEPARATOR = 256
VOCABULARY = 257
TRAIN_FRACTION = 0.9


@dataclass(frozen=True)
class Corpus:
    """Tokens ``uint16[n]`` in 0 ... 256 (bytes, and 256 between files); the first ``train_size`` are for training."""

    tokens: np.ndarray
    train_size: int
    sha256: bytes

    @staticmethod
    def of_files(files: list[Path]) -> Corpus:
        """The files' bytes in the given order. Raises ``ValueError`` if they contain too little text."""
        parts: list[np.ndarray] = []
        for file in files:
            if parts:
                parts.append(np.array([SEPARATOR], np.uint16))
            parts.append(np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16))
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
        if tokens.size < 1000:
            raise ValueError(
                f"expected at least 1000 bytes of text, got {tokens.size} from {len(files)} files"
            )
        tokens.flags.writeable = False
        return Corpus(tokens, int(tokens.size * TRAIN_FRACTION), hashlib.sha256(tokens.tobytes()).digest())

    @staticmethod
    @functools.cache
    def of_standard_library() -> Corpus:
        """The top-level ``*.py`` files of the running interpreter's standard library, sorted by name.

        Raises ``ValueError`` for an interpreter that ships its library without sources, such as a zipped one.
        """
        folder = Path(sysconfig.get_paths()["stdlib"])
        # Debian links sitecustomize.py to a file in /etc, which may be missing.
        files = sorted(file for file in folder.glob("*.py") if file.is_file())
        if not files:
            raise ValueError(f"expected the standard library's source files in {folder}, found none")
        return Corpus.of_files(files)

    def global_batch(self, *, seed: int, step: int, batch: int, length: int) -> np.ndarray:
        """Windows ``int32[batch, length + 1]`` of the train split: inputs ``[:, :-1]``, targets ``[:, 1:]``.

        Philox (Salmon et al., SC 2011) is counter-based: with the key ``(seed, step)`` every step has its own
        stream, without running through the earlier ones.
        """
        if self.train_size <= length + 1:
            raise ValueError(
                f"expected a train split longer than a window of {length + 1} tokens, got {self.train_size}"
            )
        random = np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))
        starts = random.integers(0, self.train_size - length - 1, size=batch)
        return self.tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def rank_slice(batch: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Rank ``rank``'s contiguous share of a global batch ``[B, ...]``: the ``rank``-th of ``world`` equal parts."""
    if batch.shape[0] % world:
        raise ValueError(
            f"expected a global batch divisible by the {world} ranks, got {batch.shape[0]} sequences"
        )
    share = batch.shape[0] // world
    return batch[rank * share : (rank + 1) * share]
