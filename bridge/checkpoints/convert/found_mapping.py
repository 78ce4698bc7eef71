"""The shipped mapping of a conversion that names none: by `config.json` next to the source, else by the names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader
from bridge.core.formats.whole.companions import config_beside
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import family_names, load_mapping
from bridge.core.mapping.language.table import MODEL_TYPE, MappingTable, mismatch
from bridge.core.mapping.states.equal_names import table_of_equal_names
from bridge.core.mapping.states.source_tree import find, fits
from bridge.core.text import did_you_mean, first_of


def why_mapping(
    source: CheckpointReader, template: CheckpointReader | None, conventions: Sequence[str]
) -> str:
    """Why a conversion that names no mapping, but a template or conventions, needs one; empty if it does not."""
    if template is None or conventions:
        return f"convention {conventions[0]} belongs to one"
    try:
        table_of_equal_names(source, template)
    except MappingError as error:
        return str(error)
    return ""


def found_mapping(
    source: CheckpointReader, plan: Callable[[MappingTable], object], conventions: Sequence[str], why: str
) -> tuple[MappingTable, str]:
    """The only shipped mapping for the source, and a sentence that names it.

    conventions: that the mapping must have. plan: plans the conversion with a mapping, and raises CheckpointError if
    the mapping does not fit. why: the reason for a mapping, for errors.

    Raises MappingError with the mappings that fit, if there are several, or the two nearest, if there is none. If
    `config.json` names the model, only mappings for this model fit.
    """
    shipped = [load_mapping(name) for name in family_names()]
    tables = {t.name: t for t in shipped if all(t.convention_of(name) for name in conventions)}
    if not tables:
        known_names = {name for table in shipped for name in table.conventions}
        unknown = first_of([f"{name!r}{did_you_mean(name, known_names)}" for name in conventions])
        raise MappingError(f"expected conventions of one mapping that ships, got {unknown}")
    fields, file = config_beside(source) or ({}, None)
    model = fields.get(MODEL_TYPE)
    if model is not None:
        fitting = [
            name for name, table in tables.items() if table.models and not mismatch(table.models, fields)
        ]
        # Several mappings may be for a model, such as Megatron's; the first choice is named after the model.
        fitting = [name for name in fitting if name == model] or fitting
        if len(fitting) == 1:
            # Other problems are those of this mapping, which says them best.
            return tables[fitting[0]], f"mapping {fitting[0]}, for model_type {model} in {file}"
    else:
        fitting = list(tables)
    refusals = {name: _refusal(plan, tables[name]) for name in fitting}
    planned = [name for name, refusal in refusals.items() if refusal is None]
    if len(planned) == 1:
        return tables[planned[0]], f"mapping {planned[0]}, the only one that fits the names"
    if planned:
        nearest = f"the names fit {first_of(planned, len(planned))}, which may mean different models"
    else:
        known = {name: _known(source, table) for name, table in tables.items()}
        best = sorted(known, key=lambda name: known[name], reverse=True)[:2]
        nearest = "none that ships fits, nearest are " + " and ".join(
            f"{name} ({known[name][1]} names of weights known)" for name in best
        )
        if refusal := refusals.get(best[0]):
            nearest += f". {best[0]}: {refusal}"
    about = "" if model is None else f" for model_type {model!r:.100} in {file}"
    raise MappingError(f"expected a mapping (--mapping){about}, since {why}: {nearest}")


def _refusal(plan: Callable[[MappingTable], object], table: MappingTable) -> str | None:
    """Why the mapping does not fit; None if it does."""
    try:
        plan(table)
    except CheckpointError as error:
        return str(error).partition("\n")[0]
    return None


def _known(source: CheckpointReader, table: MappingTable) -> tuple[bool, int]:
    """Whether the source has all weights that the mapping requires, and how many of its weights the mapping knows."""
    try:
        tree = find(source.tensors.values(), table, None, str(source.path))
    except MappingError:
        return False, 0
    return fits(tree, table), len(tree.weights)
