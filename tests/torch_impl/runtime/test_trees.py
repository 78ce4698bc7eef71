"""Containers of tensors: what is rebuilt, and what stays the same object; the graph behind a transform's tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from torch_impl.runtime.ground.transforms import node_of
from torch_impl.runtime.ground.trees import map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "tree", [[1, 2], (1, 2), {"a": 1, "b": 2}, Point(1, 2), {"a": [Point(1, 2)], "b": (1,)}]
)
def test_containers_change_only_with_their_leaves(tree: Any) -> None:
    assert map_leaves(tree, lambda leaf: leaf) is tree
    changed = map_leaves(tree, lambda leaf: -leaf)
    assert changed is not tree
    assert type(changed) is type(tree)
    assert map_leaves(changed, lambda leaf: -leaf) == tree != changed


def test_only_the_container_with_a_changed_leaf_is_new() -> None:
    tree = {"kept": [1, 2], "changed": Point(3, [4])}
    result = map_leaves(tree, lambda leaf: 30 if leaf == 3 else leaf)
    assert result == {"kept": [1, 2], "changed": Point(30, [4])}
    assert result["kept"] is tree["kept"]


def test_inside_vmap_the_node_is_that_of_the_graph_around_it() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    y = x * 2
    nodes = []
    torch.vmap(lambda row: nodes.append(node_of(row)) or row)(y)
    assert nodes == [y.grad_fn]
    assert node_of(y) is y.grad_fn
    assert node_of(torch.ones(2)) is None
