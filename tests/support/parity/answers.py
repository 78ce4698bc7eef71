"""Find the torch module to which a fault belongs, from the parameters that modules of both models own."""

from __future__ import annotations

import numpy as np

from tests.support.parity.bugs import Side
from tests.support.parity.pair_tools import Pair, translated


class Answers:
    """The right answers of one pair. ``tensors``: names in the state of the torch model."""

    def __init__(self, pair: Pair) -> None:
        # Fill every torch parameter with its own number, and find the numbers in the JAX tensors.
        parameters = list(pair.torch_model.named_parameters())
        marked = {name: np.full(tuple(p.shape), i, np.float32) for i, (name, p) in enumerate(parameters)}
        self.tensors = frozenset(pair.torch_model.state_dict())
        made = translated(marked, pair.mapping, pair.axes)
        self._numbers = {path: frozenset(np.unique(array).astype(int)) for path, array in made.items()}
        number = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
        self._torch = {
            path: frozenset(number[id(p)] for p in module.parameters())
            for path, module in pair.torch_model.named_modules()
        }

    def innermost(self, side: Side, path: str) -> str:
        """The innermost torch module at or around ``path`` that has a partner with the same parameters."""
        separator = "." if side == "torch" else "/"
        while path:
            owner = self._of_torch(path) if side == "torch" else self._of_jax(path)
            if owner:
                return owner
            path = path.rpartition(separator)[0]
        return ""

    def _of_torch(self, path: str) -> str:
        owned = self._torch[path]
        image = {tensor for tensor, numbers in self._numbers.items() if numbers & owned}
        paths = {"/".join(tensor.split("/")[:k]) for tensor in image for k in range(len(tensor.split("/")))}
        return path if owned and any(self._owned(candidate) == (image, owned) for candidate in paths) else ""

    def _of_jax(self, path: str) -> str:
        tensors, numbers = self._owned(path)
        alike = [torch_path for torch_path, owned in self._torch.items() if owned == numbers]
        image = {tensor for tensor, some in self._numbers.items() if some & numbers}
        return max(alike, key=len, default="") if numbers and image == tensors else ""

    def _owned(self, path: str) -> tuple[set[str], frozenset[int]]:
        """The JAX tensors below a path, and the torch parameters that they are made of."""
        below = {
            tensor: some
            for tensor, some in self._numbers.items()
            if f"{tensor}/".startswith(f"{path}/" if path else "")
        }
        return set(below), frozenset().union(*below.values())
