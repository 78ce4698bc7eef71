"""Signatures as Sphinx's Python domain reads them, with types that the reference describes under their public names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import griffe

PublicName = Callable[[str], str | None]
_KINDS = griffe.ParameterKind


def signature_of(function: griffe.Object, public_name: PublicName) -> str:
    """``(parameters) -> result`` of a function or method, without ``self`` and ``cls``.

    public_name: the path under which the reference describes what a path stands for, or nothing.
    """
    assert isinstance(function, griffe.Function)
    method = (
        function.parent is not None and function.parent.is_class and "staticmethod" not in function.labels
    )
    parameters = list(function.parameters)[1 if method else 0 :]
    returns = annotation_of(function.returns, public_name)
    return _parameters(parameters, public_name) + (f" -> {returns}" if returns else "")


def parameters_of(cls: griffe.Object, public_name: PublicName) -> str:
    """``(parameters)`` of the class's constructor; "" where this repository defines none."""
    assert isinstance(cls, griffe.Class)
    try:
        initializer = cls.all_members.get("__init__")
    except griffe.AliasResolutionError:
        initializer = None
    if isinstance(initializer, griffe.Alias):
        initializer = initializer.final_target
    if isinstance(initializer, griffe.Function):
        return _parameters(list(initializer.parameters)[1:], public_name)
    if any(str(base).endswith("NamedTuple") for base in cls.bases):
        fields = [member for member in cls.members.values() if member.is_attribute and member.annotation]
        texts = [f"{field.name}: {annotation_of(field.annotation, public_name)}" for field in fields]
        return f"({', '.join(texts)})"
    return ""


def annotation_of(annotation: griffe.Expr | str | None, public_name: PublicName) -> str:
    """The source of a type. Names of the reference are whole paths, which Sphinx shows by their last part."""
    if annotation is None or isinstance(annotation, str):
        return annotation or ""
    tokens = annotation.iterate(flat=True)
    return "".join(
        (public_name(token.canonical_path) or token.name)
        if isinstance(token, griffe.ExprName)
        else str(token)
        for token in tokens
    )


def _parameters(parameters: Sequence[griffe.Parameter], public_name: PublicName) -> str:
    texts: list[str] = []
    before: griffe.ParameterKind | None = None
    for parameter in parameters:
        kind = parameter.kind
        if before is _KINDS.positional_only and kind is not _KINDS.positional_only:
            texts.append("/")
        if kind is _KINDS.keyword_only and before not in (_KINDS.keyword_only, _KINDS.var_positional):
            texts.append("*")
        texts.append(_parameter(parameter, public_name))
        before = kind
    if before is _KINDS.positional_only:
        texts.append("/")
    return f"({', '.join(texts)})"


def _parameter(parameter: griffe.Parameter, public_name: PublicName) -> str:
    stars = {_KINDS.var_positional: "*", _KINDS.var_keyword: "**"}.get(parameter.kind, "")
    annotation = annotation_of(parameter.annotation, public_name)
    text = stars + parameter.name + (f": {annotation}" if annotation else "")
    if parameter.default is None or stars:
        return text
    return f"{text} = {parameter.default}" if annotation else f"{text}={parameter.default}"
