"""Find the names of FSDP2 and of its DTensors that the sources of a program use. Nothing of the program runs.

Names are written as in ``program_table``::

    fsdp.X                imported from torch.distributed.fsdp, or from a private module of FSDP2
    fully_shard(x=)       an argument
    .x()                  a method of a sharded module
    state_dict.x          a function of torch.distributed.checkpoint.state_dict
    DTensor.x             an attribute or method of a DTensor, or a way to make a DTensor
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import fsdp

import torch_impl

# FSDP1, which shares torch's package.
_FSDP1 = (
    "fully_sharded_data_parallel",
    "api",
    "wrap",
    "sharded_grad_scaler",
    "_common_utils",
    "_runtime_utils",
)
_FSDP2 = {*fsdp._fully_shard.__all__, "fully_shard"}
_ARGUMENTS = set(inspect.signature(torch_impl.fully_shard).parameters) - {"module", "strategy", "prefetch"}
_METHODS = {name for name in dir(fsdp.FSDPModule) if not name.startswith("_")} | {"_get_fsdp_state"}
_DTENSOR = {
    "full_tensor",
    "to_local",
    "from_local",
    "is_shard",
    "_local_tensor",
    "distribute_tensor",
    "async_save",
    "clip_grad_norm_",
    "get_total_norm",
}


def calls_in(root: Path) -> dict[str, str]:
    """Names that the files below ``root`` use, each with a first place, ``package/file.py:line``."""
    first_uses: dict[str, str] = {}
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(errors="replace")
        # Parsing thousands of files takes long.
        if not any(
            word in text for word in ("fsdp", "fully_shard", "checkpoint.state_dict", *_DTENSOR, *_METHODS)
        ):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            # Templates of other programs.
            continue
        for node in ast.walk(tree):
            for name in _names(node, "fsdp" in text or "fully_shard" in text):
                first_uses.setdefault(name, f"{file.relative_to(root.parent)}:{getattr(node, 'lineno', 0)}")
    return first_uses


def _names(node: ast.AST, shards: bool) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield from _imported(node)
    elif isinstance(node, ast.Attribute):
        if node.attr in _METHODS:
            yield f".{node.attr}()"
        elif node.attr in _DTENSOR:
            yield f"DTensor.{node.attr}"
    elif isinstance(node, ast.Name) and node.id in _DTENSOR:
        yield f"DTensor.{node.id}"
    # Most programs collect the arguments in a dict first.
    elif isinstance(node, ast.Dict) and shards:
        for key in node.keys:
            yield from _argument(key)
    elif isinstance(node, ast.Subscript) and shards:
        yield from _argument(node.slice)
    elif (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "fully_shard"
    ):
        for keyword in node.keywords:
            yield from _argument(ast.Constant(keyword.arg))


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    path = node.module or ""
    if path == "torch.distributed.checkpoint.state_dict":
        yield from (f"state_dict.{alias.name}" for alias in node.names)
    elif path.startswith(("torch.distributed.fsdp", "torch.distributed._composable.fsdp")):
        if path.removeprefix("torch.distributed.fsdp.") in _FSDP1:
            return
        private = path not in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
        yield from (f"fsdp.{alias.name}" for alias in node.names if private or alias.name in _FSDP2)


def _argument(node: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and node.value in _ARGUMENTS:
        yield f"fully_shard({node.value}=)"
