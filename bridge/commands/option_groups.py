"""Options of a command as typed groups: a dataclass parameter gives the command an option for each of its fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer reads it: each dataclass is replaced by its fields, in their order, with their defaults.

        @dataclass(frozen=True)
        class ItemOptions:                                 def verify(path, items: ItemOptions, json): ...
            item: Annotated[..., typer.Option(...)]        twinshard verify PATH --item ... --step ... --json
            step: Annotated[..., typer.Option(...)]

    No two fields of a command's groups have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, list[str]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        name, hint = parameter.name, hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            options = _options(hint)
            groups[name] = [option.name for option in options]
            parameters += options
        else:
            # Among keyword-only parameters, a required one may follow one with a default.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, options in groups.items():
            values[name] = hints[name](**{option: values.pop(option) for option in options})
        command(**values)

    # typer reads both. Python allows ``__signature__`` on any function, but typeshed does not declare it.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
