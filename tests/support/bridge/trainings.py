"""One small model trained by stock torch and by stock optax with optimizers that compute the same, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1
MAPPING = {
    "name": "two layers",
    "rule": [
        {"torch": "first.weight : o m", "jax": "first/kernel : m o"},
        {"torch": "first.bias", "jax": "first/bias"},
        {"torch": "last.weight : o m", "jax": "last/kernel : m o"},
        {"torch": "last.bias", "jax": "last/bias"},
    ],
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3, dtype=torch.float64)
        self.last = torch.nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def jax_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return jnp.mean((hidden @ params["last"]["kernel"] + params["last"]["bias"] - y) ** 2)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(8, 4)), rng.normal(size=(8, 2))


def rate_at(step: Any) -> Any:
    """A rate that falls at each step; for torch and optax."""
    return RATE / (1.0 + 0.5 * step)


def is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def label(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "kernels" if leaf.ndim > 1 else "biases", params)


def adamw(rate: Any = RATE, **options: Any) -> optax.GradientTransformation:
    return optax.adamw(rate, *BETAS, eps=EPS, weight_decay=DECAY, **options)


@dataclass(frozen=True)
class Chain:
    """One optimizer in both libraries. groups: torch's groups of weights with options, from the model.

    falling: whether the rate is `rate_at`. clip: the largest norm of the gradients. every: batches for each update.
    """

    name: str
    optax: Callable[[], optax.GradientTransformation]
    torch: Callable[[Any], torch.optim.Optimizer]
    groups: Callable[[Model], list[dict[str, Any]]] = lambda model: [{"params": [*model.parameters()]}]
    falling: bool = False
    clip: float | None = None
    every: int = 1

    def __str__(self) -> str:
        return self.name


def _torch_adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _torch_sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9)


def _split(of_biases: Mapping[str, Any]) -> Callable[[Model], list[dict[str, Any]]]:
    """Kernels and biases as two groups; the second one with other options."""

    def groups(model: Model) -> list[dict[str, Any]]:
        kernels = [p for p in model.parameters() if p.dim() > 1]
        return [{"params": kernels}, {"params": [p for p in model.parameters() if p.dim() == 1], **of_biases}]

    return groups


def _only_last(model: Model) -> list[dict[str, Any]]:
    model.first.requires_grad_(False)
    return [{"params": [*model.last.parameters()]}]


def _of_last(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "train" if path[0].key == "last" else "freeze", params
    )


CHAINS = (
    Chain("adamw", adamw, _torch_adamw),
    Chain("adamw(schedule)", lambda: adamw(rate_at), _torch_adamw, falling=True),
    Chain(
        "clip, adamw", lambda: optax.chain(optax.clip_by_global_norm(0.5), adamw()), _torch_adamw, clip=0.5
    ),
    Chain(
        "clip, adamw(schedule)",
        lambda: optax.chain(optax.clip_by_global_norm(0.5), adamw(rate_at)),
        _torch_adamw,
        falling=True,
        clip=0.5,
    ),
    Chain("MultiSteps", lambda: optax.MultiSteps(adamw(), 2), _torch_adamw, every=2),  # type: ignore[arg-type, return-value]
    Chain(
        "inject_hyperparams",
        lambda: optax.inject_hyperparams(optax.adamw)(rate_at, *BETAS, eps=EPS, weight_decay=DECAY),
        _torch_adamw,
        falling=True,
    ),
    Chain("apply_if_finite", lambda: optax.apply_if_finite(adamw(), 3), _torch_adamw),
    Chain("decay of kernels", lambda: adamw(mask=is_kernel), _torch_adamw, _split({"weight_decay": 0.0})),
    Chain(
        "multi_transform",
        lambda: optax.multi_transform({"kernels": adamw(), "biases": adamw(RATE / 2)}, label),
        _torch_adamw,
        _split({"lr": RATE / 2}),
    ),
    Chain(
        "frozen",
        lambda: optax.multi_transform({"train": adamw(), "freeze": optax.set_to_zero()}, _of_last),
        _torch_adamw,
        _only_last,
    ),
    Chain("sgd", lambda: optax.sgd(RATE, momentum=0.9), _torch_sgd),
    Chain(
        "radam(schedule)",
        lambda: optax.radam(rate_at, *BETAS, eps=EPS),
        lambda g: torch.optim.RAdam(g, RATE, BETAS, EPS),
        falling=True,
    ),
)


class TorchTraining:
    """The model, its optimizer and the number of updates."""

    def __init__(self, chain: Chain, seed: int) -> None:
        torch.manual_seed(seed)
        self.chain, self.model = chain, Model()
        self.optimizer = chain.torch(chain.groups(self.model))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def train(self, first: int, count: int) -> list[float]:
        """The losses of ``count`` updates, after ``first`` updates."""
        losses = []
        for step in range(first, first + count):
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate_at(step) if self.chain.falling else rate
            self.optimizer.zero_grad()
            for part in range(self.chain.every):
                x, y = map(torch.from_numpy, batch(step * self.chain.every + part))
                loss = torch.mean((self.model(x) - y) ** 2)
                (loss / self.chain.every).backward()
                losses.append(loss.item())
            if self.chain.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.chain.clip)
            self.optimizer.step()
        return losses

    def weights(self) -> dict[str, np.ndarray]:
        return {name: value.detach().numpy() for name, value in self.model.state_dict().items()}


class OptaxTraining:
    """The weights and the optimizer's state."""

    def __init__(self, chain: Chain, weights: Mapping[str, np.ndarray]) -> None:
        self.chain, self.optimizer = chain, chain.optax()
        self.params: Any = {}
        for name, value in weights.items():
            layer, _, leaf = name.partition(".")
            self.params.setdefault(layer, {})["kernel" if value.ndim > 1 else leaf] = jnp.asarray(value.T)
        self.state = self.optimizer.init(self.params)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first * self.chain.every, (first + count) * self.chain.every):
            loss, gradients = jax.value_and_grad(jax_loss)(self.params, *map(jnp.asarray, batch(step)))
            updates, self.state = self.optimizer.update(gradients, self.state, self.params)
            self.params = optax.apply_updates(self.params, updates)
            losses.append(float(loss))
        return losses

    def weights(self) -> dict[str, np.ndarray]:
        return {
            f"{layer}.{'weight' if leaf == 'kernel' else leaf}": np.asarray(value).T
            for layer, leaves in self.params.items()
            for leaf, value in leaves.items()
        }

    def save(self, path: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), {"params": self.params, "opt_state": self.state})

    def restore(self, path: Path) -> None:
        """By stock Orbax, into the tree of a new training."""
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path.absolute(), {"params": self.params, "opt_state": self.state})
        self.params, self.state = restored["params"], restored["opt_state"]
