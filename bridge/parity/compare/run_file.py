"""A comparison as a TOML file, for ``twinshard parity RUN.toml``: see ``docs/reference/parity-run-file.md``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.extras import install_advice
from bridge.core.mapping.language.rules import family_names
from bridge.core.text_files import load_toml

_PLAIN = {"dtype": str, "steps": int, "scale": (int, float), "weights": str, "axes": dict, "self_test": bool}
_KEYS = {"mapping", "loss", "torch", "jax", "batch", "pair", *_PLAIN}


class RunFileError(Exception):
    """A run file that cannot be used: the message names the key and what was expected."""


_EXTRAS = {"torch": "torch", "jax": "jax", "flax": "jax", "optax": "jax"}
"""By package, the extra that brings it."""


@dataclass(frozen=True)
class ModelSource:
    """Where one model comes from. ``arguments``: for the function ``model``."""

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None


@dataclass(frozen=True)
class RunFile:
    """A validated run file. ``folder``: where relative paths begin."""

    folder: Path
    mapping: str | Mapping[str, object]
    torch: ModelSource
    jax: ModelSource
    batch: Mapping[str, Any]
    loss: str | tuple[str, str] | None = None
    dtype: str = "float32"
    steps: int = 3
    scale: float | None = None
    weights: str = "own"
    axes: Mapping[str, int] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)
    self_test: bool = False

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunFile:
        """Read and check a file. Raises ``RunFileError``."""
        file = Path(path)
        try:
            table = load_toml(file, RunFileError)
        except (OSError, ValueError) as error:
            raise RunFileError(f"{file}: expected a TOML file: {error}") from error
        unknown = sorted(table.keys() - _KEYS)
        if unknown:
            raise RunFileError(f"{file}: expected only {', '.join(sorted(_KEYS))}, got {', '.join(unknown)}")
        wrong = [key for key in ("mapping", "torch", "jax", "batch") if key not in table]
        if wrong:
            raise RunFileError(f"{file}: expected {', '.join(wrong)}, got none")
        return cls(
            file.resolve().parent,
            _mapping(table["mapping"], file),
            _model(table["torch"], "torch", file),
            _model(table["jax"], "jax", file),
            _checked(table, "batch", dict, file),
            _loss(table.get("loss"), file),
            **{key: _checked(table, key, kind, file) for key, kind in _PLAIN.items() if key in table},
            pairs=_pairs(table.get("pair", []), file),
        )

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Inside, the folder of the file and the working directory are on Python's path."""
        added = [str(self.folder), os.getcwd()]
        sys.path[:0] = added
        try:
            yield
        finally:
            for folder in added:
                sys.path.remove(folder)

    def build(self, side: str) -> Any:
        """The model of side "torch" or "jax", built by its function."""
        source: ModelSource = getattr(self, side)
        maker = resolve(source.model, f"[{side}] model")
        try:
            return maker(**source.arguments)
        except Exception as error:
            raise RunFileError(
                f"[{side}] model: {source.model} raised {type(error).__name__}: {error!s:.300}"
            ) from error

    def losses(self) -> Any:
        """The loss as ``parity`` takes it."""
        if isinstance(self.loss, tuple):
            sides = zip(self.loss, ("torch", "jax"), strict=True)
            return tuple(resolve(path, f"[loss] {side}") for path, side in sides)
        return self.loss

    def arrays(self) -> Any:
        """The batch."""
        batch = dict(self.batch)
        if "file" in batch:
            if set(batch) != {"file"}:
                raise RunFileError(f"[batch]: expected only file, got {', '.join(sorted(batch))}")
            return _arrays_of(self.folder / str(batch["file"]))
        shape, seed = batch.get("tokens"), batch.get("seed", 0)
        sizes = [*shape, batch.get("vocabulary")] if isinstance(shape, list) and shape else [None]
        if batch.keys() - {"tokens", "vocabulary", "seed"} or not all(
            isinstance(number, int) and number >= least
            for number, least in ((seed, 0), *((size, 1) for size in sizes))
        ):
            keys = ", ".join(f"{name} = {number!r:.40}" for name, number in batch.items())
            raise RunFileError(
                '[batch]: expected file = "batch.npz", or tokens = [rows, length] and vocabulary = size, above 0, '
                f"and seed = number, got {keys or 'nothing'}"
            )
        return np.random.default_rng(seed).integers(0, sizes[-1], shape)


def resolve(path: str, where: str) -> Callable[..., Any]:
    """The object that ``package.module:name`` names. Raises ``RunFileError``."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise RunFileError(f'{where}: expected "package.module:function", got {path!r}')
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        extra = _EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        advice = f": {install_advice(extra)}" if extra else ""
        raise RunFileError(f"{where}: cannot import {path}: {error}{advice}") from error
    if not callable(target):
        raise RunFileError(f"{where}: expected a function, got {type(target).__name__} {path}")
    result: Callable[..., Any] = target
    return result


def _arrays_of(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored.items())
    except (OSError, ValueError) as error:
        raise RunFileError(f"[batch] file: expected arrays in {path} (.npz or .npy): {error}") from error
    return arrays["arr_0"] if set(arrays) == {"arr_0"} else arrays


def _mapping(value: object, file: Path) -> str | Mapping[str, object]:
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise RunFileError(f"{file}: expected a text or a table for mapping, got {value!r}")
    return value if value in family_names() else str(file.resolve().parent / value)


def _model(value: object, side: str, file: Path) -> ModelSource:
    if not isinstance(value, dict) or not isinstance(value.get("model"), str):
        raise RunFileError(
            f'{file}: expected a table [{side}] with model = "package.module:function", got {value!r:.100}'
        )
    unknown = sorted(value.keys() - {"model", "arguments", "checkpoint"})
    if unknown:
        raise RunFileError(
            f"{file}: expected only model, arguments, checkpoint in [{side}], got {', '.join(unknown)}"
        )
    checkpoint = _checked(value, "checkpoint", str, file, None)
    if checkpoint is not None and "://" not in checkpoint:
        checkpoint = str(file.resolve().parent / checkpoint)
    return ModelSource(value["model"], _checked(value, "arguments", dict, file, {}), checkpoint)


def _loss(value: object, file: Path) -> str | tuple[str, str] | None:
    if value is None or value in ("next_token", "probe"):
        return None if value is None else str(value)
    if isinstance(value, dict) and set(value) == {"torch", "jax"}:
        return str(value["torch"]), str(value["jax"])
    raise RunFileError(
        f'{file}: expected "next_token", "probe" or a table [loss] with torch and jax, got {value!r:.100}'
    )


def _pairs(value: object, file: Path) -> dict[str, str]:
    if not isinstance(value, list) or not all(
        isinstance(pair, dict) and set(pair) == {"torch", "jax"} for pair in value
    ):
        raise RunFileError(f"{file}: expected [[pair]] tables with torch and jax, got {value!r:.100}")
    return {pair["torch"]: pair["jax"] for pair in value}


def _checked(table: Mapping[str, Any], key: str, type_: Any, file: Path, *default: Any) -> Any:
    if key not in table and default:
        return default[0]
    value = table[key]
    if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
        wanted = {dict: "a table", str: "a text", bool: "true or false"}.get(type_, "a number")
        raise RunFileError(f"{file}: expected {wanted} for {key}, got {value!r:.100}")
    return value
