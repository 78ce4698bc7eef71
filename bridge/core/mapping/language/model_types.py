"""The models that a mapping is for, by what their `config.json` says.

    [models.llama]                             # a model_type
    attention_bias = [false, "absent"]         # a field that would make it another model: the values at which it is not
    [models.mistral]
    sliding_window = ["null"]                  # TOML has no null
    "text_config.hidden_act" = ["silu"]        # a field of a table inside

The same names and shapes may belong to models that compute something else: Granite multiplies, Helium turns other
pairs of elements, SmolLM3 leaves positions out of some layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bridge.core.mapping.language.errors import MappingError

Value = str | int | float | bool
Models = Mapping[str, Mapping[str, tuple[Value, ...]]]
"""By model_type: for each field the values that it may have. "null" and "absent" stand for what their names say."""

MODEL_TYPE = "model_type"
_NULL, _ABSENT = "null", "absent"


def parse_models(data: object, where: str) -> Models:
    """The table [models] of a mapping file. MappingError when it is anything else than described above."""
    if not isinstance(data, dict) or not all(_is_model(fields) for fields in data.values()):
        raise MappingError(
            f"expected a table [models] in {where}, which gives for each model_type a table of fields with lists of "
            f"values, got {data!r:.200}"
        )
    return MappingProxyType(
        {
            model_type: {field: tuple(values) for field, values in fields.items()}
            for model_type, fields in data.items()
        }
    )


def mismatch(models: Models, config: Mapping[str, object]) -> str | None:
    """What of a model's configuration says that it is none of these models; None if nothing does.

    A configuration without a model_type says nothing.
    """
    model_type = config.get(MODEL_TYPE)
    if not models or model_type is None:
        return None
    if not isinstance(model_type, str) or model_type not in models:
        return f"expected {MODEL_TYPE} {' or '.join(map(repr, models))}, found {model_type!r:.100}"
    for field, allowed in models[model_type].items():
        value = field_of(config, field, _ABSENT)
        if not _allowed(value, allowed):
            expected = " or ".join(_shown(value) for value in allowed if value != _ABSENT)
            shown = "none" if value is _ABSENT else _shown(value)
            return f"expected {field} {expected}, found {shown:.100} ({MODEL_TYPE} {model_type!r})"
    return None


def field_of(config: Mapping[str, object], field: str, absent: object = None) -> object:
    """The value of a field, such as "head_dim" or "text_config.head_dim"; ``absent`` where there is none."""
    value: object = config
    for key in field.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return absent
        value = value[key]
    return value


def _is_model(fields: object) -> bool:
    return isinstance(fields, dict) and all(
        isinstance(values, list) and values and all(isinstance(v, Value) for v in values)
        for values in fields.values()
    )


def _allowed(value: object, allowed: Sequence[Value]) -> bool:
    if value is None:
        return _NULL in allowed
    return value in allowed


def _shown(value: object) -> str:
    if value == _NULL:
        return _NULL
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)
