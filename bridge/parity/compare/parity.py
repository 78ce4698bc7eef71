"""``parity``: compare a PyTorch model and a JAX model, also those of a run file, and find where they first diverge."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bridge.core.extras import installed_versions, why_no_pictures
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
from bridge.core.long_calls import Follow, followed
from bridge.core.mapping import MappingError, MappingTable
from bridge.core.mapping.language.rules import MappingLike, mapping_table
from bridge.core.mapping.one_rule.sizes import with_config, with_config_fields
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.source_tree import find
from bridge.core.text import first_of
from bridge.parity.compare.run_file import RunFile, RunFileError
from bridge.parity.partners.weight_map import WeightMap, found_in_model
from bridge.parity.recorded.align import match_leaves
from bridge.parity.recorded.recording import Leaves, Side, checked_dtype, probe_values
from bridge.parity.recorded.store import Store
from bridge.parity.report_page.html import write_html
from bridge.parity.report_page.picture import write_picture
from bridge.parity.report_page.report import ParityReport, Revealed
from bridge.parity.stages.compare import compare_sides

_PACKAGES = ("torch", "jax", "flax", "numpy", "twinshard")


def parity(
    torch_model: Any,
    jax_model: Any,
    batch: Any,
    *,
    mapping: MappingLike,
    loss: Any = None,
    axes: Mapping[str, int] | None = None,
    pairs: Mapping[str, str] | None = None,
    dtype: str = "float32",
    steps: int = 3,
    scale: float | None = None,
    weights: Literal["own", "torch", "jax"] = "own",
    torch_optimizer: Any = None,
    jax_optimizer: Any = None,
    config: Any = None,
    self_test: bool = False,
    progress: Follow = None,
) -> ParityReport:
    """Compare weights, modules, loss, gradients, updates and ``steps`` of training of two models.

    Args:
        torch_model: an ``nn.Module``, in the mode (train or eval) to compare; or a ``Side``.
        jax_model: an nnx module; ``(linen module, variables)``; ``(function, pytree of parameters)``; or a ``Side``.
        batch: NumPy arrays. An array is given as ``model(x)``, a tuple as ``model(*x)``, a dict as ``model(**x)``;
            with ``loss="next_token"`` it is int tokens ``[B, T + 1]``.
        mapping: which parameters correspond: a shipped family, a TOML file or a table.
        loss: ``"next_token"``; None for a fixed random projection of the outputs; or a pair of functions
            ``(model, batch) -> scalar``, torch's and JAX's, which get the whole batch, labels included.
        axes: sizes that shapes do not determine, as ``--axis`` gives them. A torch model with a ``config`` needs none.
        pairs: partners among modules that own no parameters: JAX paths by torch paths.
        dtype: the compute dtype under test. Reference runs are in float64.
        scale: factor for all parameters with two or more axes, during the comparison only. Weights near their
            initialization make attention almost uniform, which hides mistakes in it.
        weights: "torch" copies torch's weights into the JAX model for the comparison, "jax" the other way round;
            "own" compares the models with their own weights.
        config: a configuration with ``to_dict()`` that gives the axes; default ``torch_model.config``, if it exists.
        self_test: also plant typical faults in copies of the torch model, and report which faults this batch shows.
        progress: called with the name of each stage; by default tqdm shows it in a notebook and on a terminal, and
            False shows nothing.
        torch_optimizer, jax_optimizer: see ``TorchSide`` and ``JaxSide``; AdamW by default, in both.

    Neither model is changed. Raises ``MappingError`` if the mapping does not fit, ``TypeError`` if an argument is not a
    model, ``ValueError`` for anything else that cannot be compared.
    """
    dtype = checked_dtype(dtype, steps)
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a number above 0, got {scale}")
    torch, jax = sides_of(torch_model, jax_model, loss, torch_optimizer, jax_optimizer)
    if loss in (None, "probe") and not _is_side(torch_model) and not _is_side(jax_model):
        # Both losses multiply the same outputs by the same numbers. Imported here for the same reason as the sides.
        from bridge.parity.jax.losses import probe
        from bridge.parity.torch.losses import probe_loss

        ours, theirs = matched_probes(torch, jax, batch)
        losses = partial(probe_loss, numbers=ours), partial(probe, numbers=theirs)
        torch, jax = sides_of(torch_model, jax_model, losses, torch_optimizer, jax_optimizer)
    table = mapping_table(mapping, axes)
    assert table is not None
    config = config if config is not None else getattr(torch_model, "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    table = with_config_fields(table, fields, "the torch model's config")
    relation = WeightMap.of_sides(table, torch, jax)
    if hasattr(jax, "hold"):
        jax.hold(name for name, own in relation.sources.items() if relation.torch_buffers.issuperset(own))
    with _weights_for(torch, jax, relation, weights, scale), followed("parity", progress) as say:
        report = compare_sides(
            torch, jax, batch, relation, dtype=dtype, module_pairs=pairs, steps=steps, progress=say
        )
        revealed: tuple[Revealed, ...] = ()
        if self_test:
            if say is not None:
                say("self-test: typical faults, one at a time")
            # Imported here, not at the top: traces are also compared where torch is not installed.
            from bridge.parity.torch.self_test import plant_faults

            revealed = tuple(plant_faults(torch, batch, dtype))
    return replace(report, versions=installed_versions(*_PACKAGES), revealed=revealed)


@contextmanager
def _weights_for(
    torch: Side, jax: Side, relation: WeightMap, weights: str, scale: float | None
) -> Iterator[None]:
    """Set the weights of the comparison, and restore the models' own weights after it."""
    if weights not in ("own", "torch", "jax"):
        raise ValueError(f"weights: expected own, torch or jax, got {weights!r}")
    matrices = {name for name, leaf in torch.weights().items() if leaf.ndim > 1}
    ours, theirs = (Store().leaves({**side.weights(), **side.buffers()}) for side in (torch, jax))
    try:
        if weights == "torch":
            jax.load({**theirs, **_cast(relation.to_jax(ours), theirs)})
        elif weights == "jax":
            torch.load({**ours, **_cast(relation.to_torch(theirs), ours)})
        if scale is not None:
            # A buffer on one side is not a matrix that training could enlarge.
            twins = {name: own for name, own in relation.sources.items() if name not in relation.jax_buffers}
            matrices -= {n for name in relation.jax_buffers for n in relation.sources.get(name, ())}
            torch.load(_scaled(torch.weights(), scale, matrices))
            jax_matrices = {name for name, own in twins.items() if matrices.issuperset(own)}
            jax.load(_scaled(jax.weights(), scale, jax_matrices))
        yield
    finally:
        if weights == "jax" or scale is not None:
            torch.load(ours)
        if weights == "torch" or scale is not None:
            jax.load(theirs)


def _cast(leaves: Leaves, like: Leaves) -> dict[str, np.ndarray]:
    return {name: leaf.astype(like[name].dtype) for name, leaf in leaves.items() if name in like}


def _scaled(leaves: Leaves, scale: float, names: set[str]) -> dict[str, np.ndarray]:
    return {
        name: (leaf * scale).astype(leaf.dtype) if name in names else leaf for name, leaf in leaves.items()
    }


def sides_of(
    torch_model: Any, jax_model: Any, loss: Any = None, torch_optimizer: Any = None, jax_optimizer: Any = None
) -> tuple[Side, Side]:
    """Both models as sides; a model that already is a side is returned unchanged."""
    torch_loss, jax_loss = loss if isinstance(loss, tuple | list) else (loss, loss)
    torch, jax = torch_model, jax_model
    # A framework is imported only if one of its models is given.
    if not _is_side(torch_model):
        from bridge.parity.torch.side import TorchSide

        torch = TorchSide(torch_model, torch_loss, optimizer=torch_optimizer)
    if not _is_side(jax_model):
        from bridge.parity.jax.side import JaxSide

        jax = JaxSide(jax_model, jax_loss, optimizer=jax_optimizer)
    return torch, jax


def _is_side(model: Any) -> bool:
    return hasattr(model, "framework") and hasattr(model, "rerun")


def matched_probes(torch: Side, jax: Side, batch: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Numbers for both models' output leaves, by the places of the leaves.

    Raises ``ValueError`` if no floating output of one model fits one of the other.
    """
    ours, theirs = (side.record(batch, "float64", backward=False).calls[0].outputs for side in (torch, jax))
    first: dict[str, np.ndarray] = {}
    second: dict[str, np.ndarray] = {}
    for name, other, way in match_leaves(ours, theirs):
        if ours[name].dtype.kind not in "iub":
            first[name] = probe_values(str(len(first)), ours[name].shape)
            second[other] = way.to_jax(first[name])
    if not first:
        shapes = [
            {name or "output": leaf.shape for name, leaf in outputs.items()} for outputs in (ours, theirs)
        ]
        raise ValueError(
            f"loss: expected a floating output of the torch model, {shapes[0]}, that fits an output of the JAX model, "
            f"{shapes[1]}; give a loss"
        )
    return first, second


def compare_run_file(run: RunFile, progress: Follow = None) -> ParityReport:
    """Build both models of a run file and compare them. Raises ``RunFileError``, and what ``parity`` raises."""
    with run.importing():
        torch_model, jax_model = run.build("torch"), run.build("jax")
        try:
            sides = sides_of(torch_model, jax_model, run.losses())
        except TypeError as error:
            raise RunFileError(f"[torch] model, [jax] model: {error}") from error
        table = mapping_table(run.mapping, run.axes)
        assert table is not None
        notes: list[str] = []
        for side, source in zip(sides, (run.torch, run.jax), strict=True):
            if source.checkpoint is not None:
                weights, kept = stored_weights(source.checkpoint, table, side)
                side.load(weights)
                if kept:
                    notes.append(f"{source.checkpoint}: buffers without values, unchanged: {first_of(kept)}")
        options: dict[str, Any] = {"weights": run.weights, "dtype": run.dtype, "steps": run.steps}
        report = parity(
            *sides,
            run.arrays(),
            mapping=table,
            config=getattr(torch_model, "config", None),
            pairs=run.pairs,
            scale=run.scale,
            self_test=run.self_test,
            progress=progress,
            **options,
        )
        return replace(report, notes=(*report.notes, *notes))


def write_report(report: ParityReport, folder: Path) -> None:
    """``report.json``, ``report.html`` and, with matplotlib, ``parity.png`` in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder / "report.json")
    write_html(report, folder / "report.html")
    if why_no_pictures() is None:
        write_picture(report, folder / "parity.png")


def stored_weights(
    path: str | os.PathLike[str], mapping: MappingTable, side: Side
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The weights and buffers of a model, read from a checkpoint of any format in any convention of the mapping.

    Also returns the names of buffers that the checkpoint lacks. Raises ``CheckpointError`` (``MappingError``) if the
    checkpoint lacks parameters.
    """
    parameters, buffers = side.weights(), side.buffers()
    model, separator, where = {**parameters, **buffers}, side.separator, f"the {side.framework} model"
    own, names = found_in_model(mapping, parameters, buffers, separator, where)
    with open_checkpoint(path) as reader:
        table = with_config(mapping, reader)
        stored = find(reader.tensors.values(), table, None, str(path))
        same = stored.convention.name == own.convention.name
        if same:
            values = {weight: reader.read(info.name) for weight, info in stored.weights.items()}
        else:
            target = own.convention.at("{w}", own.convention.states)
            plan = make_plan(reader, "orbax" if separator == "/" else "dcp", table, into=target)
            values = {
                name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()
            }
        loaded = {names[info.name]: values[w] for w, info in own.weights.items() if w in values}
        for name in buffers.keys() - loaded.keys() if same else ():
            # Buffers that the mapping does not know, or that are next to the root of the weights, as batch_stats are.
            ends = [
                info.name
                for other, info in stored.others.items()
                if f"{separator}{other}".endswith(separator + name) and info.shape == buffers[name].shape
            ]
            if len(ends) == 1:
                loaded[name] = reader.read(ends[0])
    missing = sorted(parameters.keys() - loaded.keys())
    if missing:
        raise MappingError(f"{path}: expected the weights of {where}, found none for {first_of(missing)}")
    cast = {name: value.astype(model[name].dtype) for name, value in loaded.items()}
    return cast, tuple(sorted(buffers.keys() - loaded.keys()))
