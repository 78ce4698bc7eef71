"""What a mapping reads from `config.json`: sizes of axes that the weights' shapes leave open, and the kind of model.

    from scalars of the checkpoint     [axes]    vocab = "train/vocab_size"
    from `config.json` next to it      [config]  d = ["head_dim", "text_config.head_dim", "hidden_size / num_heads"]
                                                 r = ["num_heads / num_kv_heads if grouped", "1 if not multi_query"]
                                                 choice = ["1 if kind is a|b", "unclear if kind", "0"]

The first text that `config.json` can answer gives the size: a number, a field, or a quotient of a field and another
field or a number, rounded down with "//". With "if", it applies if that field is true or a text; with "if not", if the
field exists and is false; with "if ... is", if the field is one of these texts. "unclear" ends the search without a
size. The size counts only if the mapping's [axes] gives none, and the caller's size must be equal. A mapping for
certain models (`table.py`) refuses others. What it says of tied embeddings is compared with the weights (`tied.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from bridge.core.formats.reading.model_files import CONFIG_FILE
from bridge.core.formats.tensors.base import CheckpointReader, TensorInfo
from bridge.core.formats.tensors.leaves import separator_of
from bridge.core.formats.whole.companions import config_beside
from bridge.core.mapping.language.arithmetic import QUOTIENT, evaluate, names_in
from bridge.core.mapping.language.entries import HALF, PAIR
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.operations import ZEROS
from bridge.core.mapping.language.rules import family_names, load_mapping
from bridge.core.mapping.language.table import MappingTable, Told, field_of, mismatch
from bridge.core.mapping.one_rule.instance import Axes

_TIES = "tie_word_embeddings"
_LAYERS = "num_hidden_layers"
_UNCLEAR = -1
_FIELD = r"[A-Za-z_][\w.]*"
_OF_FIELDS = re.compile(r"\d+|[^{/\d][^{/]*(?://?[^{/]*)?")
_SIZE = re.compile(
    r"\s*(?P<size>.*?)"
    rf"(?:\s+if(?P<no>\s+not)?\s+(?P<condition>(?!not\b){_FIELD})(?:\s+is\s+(?P<text>\w+(?:\|\w+)*))?)?\s*"
)


def with_stored_sizes(mapping: MappingTable, reader: CheckpointReader) -> MappingTable:
    """The table with the sizes from scalars of the checkpoint, for use on a part of it that may lack those scalars.

    Raises MappingError for a scalar that is not a size.
    """
    by_path = {"/".join(map(str, info.path)): info for info in reader.tensors.values()}
    stored = {axis: value for axis, value in mapping.axes.items() if isinstance(value, str) and "/" in value}
    return mapping.with_axes(
        {
            axis: _scalar(reader, mapping, axis, by_path[path])
            for axis, path in stored.items()
            if path in by_path
        }
    )


def known_sizes(reader: CheckpointReader, mapping: MappingTable) -> Axes:
    """The sizes in the mapping's table of axes, some of which come from scalars of the checkpoint.

    Raises MappingError for axes that name each other, for a rotary axis of odd size, and for a scalar that is no size.
    """
    sizes: dict[str, int] = {}
    alias: dict[str, str] = {}
    absent: dict[str, str] = {}
    table = with_stored_sizes(mapping, reader).axes
    for axis, value in table.items():
        end, seen = axis, [axis]
        while isinstance(target := table.get(end), str) and "/" not in target:
            if target in seen:
                raise MappingError(
                    f"the axes {' = '.join([*seen, target])} of mapping {mapping.name} form a loop"
                )
            end = target
            seen.append(target)
        if end != axis:
            alias[axis] = end
        elif isinstance(value, int):
            sizes[axis] = value
        else:
            name = value.replace("/", separator_of(reader.format))
            absent[axis] = f"the mapping takes it from {name}, which {reader.path} does not have"
    for axis in mapping.axes_with(HALF):
        sizes[axis + HALF] = 2
        if (size := sizes.get(alias.get(axis, axis))) is not None:
            if size % 2:
                raise MappingError(
                    f"expected an even size for the rotary axis {axis} of mapping {mapping.name}, got {size}"
                )
            sizes[axis + PAIR] = size // 2
    sizes |= {axis + ZEROS: sizes[axis] for axis in mapping.axes_with(ZEROS) if axis in sizes}
    return Axes(sizes, alias, absent, asked=(*mapping.config, *absent))


def _scalar(reader: CheckpointReader, mapping: MappingTable, axis: str, info: TensorInfo) -> int:
    if info.shape != () or info.dtype.kind not in "iu":
        raise MappingError(
            f"expected a scalar integer in {info.name} for axis {axis} of mapping {mapping.name}, "
            f"got {info.dtype} of shape {info.shape}"
        )
    size = int(reader.read(info.name))
    if size < 0:
        raise MappingError(f"expected a size of 0 or more in {info.name} for axis {axis}, got {size}")
    return size


def with_config(table: MappingTable, reader: CheckpointReader) -> MappingTable:
    """The table with the sizes from a `config.json` next to the checkpoint, if there is one.

    Raises CheckpointError if the file cannot be read, and MappingError if its numbers are not sizes, or if it says that
    the checkpoint belongs to a model that the mapping does not support.
    """
    wanted = (table.config.keys() - table.axes.keys()) | (table.config.keys() & table.asked)
    if not (table.models or wanted or any(rule.tied_to for rule in table.rules)):
        return table
    config = config_beside(reader)
    if config is None:
        return table
    fields, file = config
    require_model(table, fields, str(file))
    return with_config_fields(table, fields, str(file))


def require_model(table: MappingTable, fields: Mapping[str, object], where: str) -> None:
    """Check that the mapping supports the model with this configuration; ``where`` names it in errors.

    Raises MappingError if the configuration says otherwise.
    """
    wrong = mismatch(table.models, fields)
    if wrong is None:
        return
    others = {name: load_mapping(name).models for name in family_names()}
    fitting = [name for name, models in others.items() if models and mismatch(models, fields) is None]
    better = " or ".join(f"--mapping {name}" for name in fitting if name != table.name)
    raise MappingError(
        f"{where}: mapping {table.name} is not for this model: {wrong}. The names of the weights may be the same, but "
        "the model computes something else from them. Choose a mapping for this "
        f"model{f' ({better})' if better else ''}, or, if you know that this mapping fits the model's weights, insist "
        f"(--any-model; in a program load_mapping({table.name!r}).for_any_model())"
    )


def with_config_fields(table: MappingTable, fields: Mapping[str, object], where: str) -> MappingTable:
    """The table with the sizes from a configuration's fields; ``where`` names it in errors.

    Raises MappingError if the numbers are not sizes, or differ from the caller's.
    """
    sizes = {}
    checked = table.asked if not table.any_model else frozenset[str]()
    for axis in table.config:
        if axis in table.axes and axis not in checked:
            continue
        values = ((text, _config_value(text, fields, where, axis)) for text in table.config[axis])
        text, size_ = next((pair for pair in values if pair[1] is not None), ("", _UNCLEAR))
        if size_ is None or size_ == _UNCLEAR:
            continue
        if axis in checked and size_ != table.axes[axis]:
            raise MappingError(
                f"{where} says that {axis} is {size_} ({text}): expected the same from --axis, got "
                f"{axis}={table.axes[axis]}. Leave --axis out, or, if the file belongs to another model, insist "
                "(--any-model)"
            )
        sizes[axis] = size_
    ties = next(
        (t for f in (_TIES, f"text_config.{_TIES}") if isinstance(t := field_of(fields, f), bool)), table.ties
    )
    layers = (field_of(fields, field) for field in (_LAYERS, f"text_config.{_LAYERS}"))
    count = next((number for number in layers if type(number) is int), None)
    told = Told(where, sizes, None if table.any_model else count)
    return replace(table.with_axes(sizes), ties=None if table.any_model else ties, told=told)


def _config_value(text: str, fields: Mapping[str, object], file: str, axis: str) -> int | None:
    """The size that a text of [config] gives; None if a field is missing or null, or the condition fails.

    -1 if the text says that the fields are unclear.
    """
    match = _SIZE.fullmatch(text)
    try:
        names = names_in(match["size"] if match else "", QUOTIENT)
    except ValueError:
        match = None
    if match is None or (match["no"] and match["text"]) or not _OF_FIELDS.fullmatch(match["size"]):
        raise MappingError(
            f"expected a field of {CONFIG_FILE}, a quotient of two such as 'hidden_size / num_heads', or a number, "
            f"with or without a condition such as 'if grouped' or 'if not grouped', got {text!r}"
        )
    condition = match["condition"]
    if condition is not None:
        value = field_of(fields, condition)
        if match["text"] is not None:
            holds = value in match["text"].split("|")
        else:
            holds = value is False if match["no"] else value is True or isinstance(value, str)
        if not holds:
            return None
    if (size := match["size"]) == "unclear":
        return _UNCLEAR
    numbers = [field_of(fields, name) for name in names]
    if None in numbers:
        return None
    # A number of layers may be 0.
    least = 0 if names == [size] else 1
    if not all(type(number) is int and number >= least for number in numbers):
        raise MappingError(
            f"{file}: expected positive integers for {text!r}, got {numbers}. If the file is wrong, give the size "
            f"(--axis {axis}=SIZE --any-model)"
        )
    try:
        return int(evaluate(size, dict(zip(names, cast(list[int], numbers), strict=True))))
    except (ValueError, ZeroDivisionError) as error:
        raise MappingError(f"{file}: expected {text!r} to be an integer, got {error}") from error
