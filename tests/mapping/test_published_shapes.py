"""Families against published models by shapes alone: the class on the meta device, planned there and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bridge.core.formats.tensors.base import Box, TensorInfo, TreePath
from bridge.core.mapping import load_mapping, make_plan
from bridge.core.mapping.one_rule.sizes import require_model, with_config_fields
from bridge.core.mapping.plan.running import RunState
from tests.support.bridge.published_decoders import PUBLISHED

Shapes = Mapping[str, tuple[int, ...]]


def without_values(format: str, paths: Mapping[TreePath, tuple[int, ...]]) -> RunState:
    """A checkpoint whose tensors nobody can read."""
    between = "/" if format == "orbax" else "."
    named = {between.join(map(str, path)): (path, shape) for path, shape in paths.items()}
    dtype = np.dtype(np.float32)
    infos = {n: TensorInfo(n, p, s, dtype, (Box.whole(s),)) for n, (p, s) in named.items()}
    return RunState(format, "the model", infos, {}, {}, lambda name: None)


def class_shapes(
    class_name: str, config: Mapping[str, Any]
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The shapes of a model's weights, and the `config.json` that transformers writes for the model."""
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**copy.deepcopy(dict(config))))
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state, model.config.to_dict()


@pytest.mark.fast_cases("tiiuae/falcon-rw-1b", "microsoft/phi-4")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_by_its_shapes(name: str) -> None:
    published = PUBLISHED[name]
    shapes, written = class_shapes(published.class_name, published.config)
    count = sum(map(math.prod, shapes.values()))
    assert published.parameters in (count, None)
    family = load_mapping(published.family)
    require_model(family, published.config, "config.json")
    table = with_config_fields(family, published.config, "config.json")
    require_model(family, written, "config.json")
    assert with_config_fields(family, written, "config.json") == table
    torch_state = without_values("dcp", {("model", weight): shape for weight, shape in shapes.items()})
    there = make_plan(torch_state, "orbax", table)
    tree = {t.path[1:]: t.shape for t in there.tensors.values()}
    assert sum(map(math.prod, tree.values())) == count
    tree_shapes = {"/".join(map(str, path)): shape for path, shape in tree.items()}
    assert published.shapes.items() <= tree_shapes.items()
    paths = {("params", *path): shape for path, shape in tree.items()}
    back = make_plan(without_values("orbax", paths), "dcp", table, into="torch")
    assert {t.path[1]: t.shape for t in back.tensors.values()} == shapes
