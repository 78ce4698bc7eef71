"""The process that compiles a step for a target: ``python -m bridge.compiling.target_leg``, see ``leg_process.py``.

A step is two programs, gradients and update, as ``jax_impl.make_train_step`` runs them. Nothing is allocated. Arrays
that are alive during a program, such as the moments while gradients are computed, count in its peak. Arrays in the
host's memory are counted separately::

    gradients   weights, batch -> gradients    + temporary    also alive: moments
    update      weights, moments, gradients -> the same arrays, donated, + temporary    also alive: the batch
"""

from __future__ import annotations

import functools
import json
import re
import time
import warnings
from typing import Any

from bridge.compiling import compiled_leg
from bridge.compiling.compile_cache import key_of, load, save
from bridge.compiling.leg_process import serve
from bridge.compiling.machines import tpu_text
from bridge.compiling.machines.compilers import devices_of, options_of, versions
from bridge.compiling.machines.targets import Target, target_named
from bridge.compiling.target_step import StepRequest
from bridge.planning.models.errors import PlanError
from bridge.planning.models.runtimes import framework, part

PROGRAMS = ("gradients", "update")
_HOST = "pinned_host"
_AMOUNT = r"([\d.]+)([KMGT]?)i?B?"


def main() -> None:
    serve(answer)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """``request``: step, policy (text), source, target, engine, recommended (options of XLA's GPU scheduler)."""
    jax = framework("jax")
    target = target_named(request["target"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        plan, state, batch, lowered = lowered_step(request, target)
    told = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    used = versions(target.platform)
    options = options_of(target, request["recommended"])
    texts = [program.as_text() for program in lowered]
    key = key_of([str(target), str(options), str(sorted(used.items())), *texts])
    kept = load(key)
    # Texts that were unreadable before may be readable now.
    if kept is not None and "unread" not in kept:
        return {**kept, "warnings": told, "cached": True}
    host = _bytes((state.weights, state.opt_state), on_host=True)
    gradients = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=plan.sharding(path))
        for path, array in lowered[0].out_info[1].items()
    ]
    held = {
        "weights": _bytes(state.weights),
        "moments": _bytes(state.opt_state),
        "gradients": _bytes(gradients),
        "batch": _bytes(batch),
        "variables": _bytes(state.variables),
    }
    tpu_text.clear()
    begun = time.monotonic()
    programs: dict[str, Any] = {}
    for name, program in zip(PROGRAMS, lowered, strict=True):
        try:
            programs[name] = program.compile(options)
        except framework("jax.errors").JaxRuntimeError as error:
            needed = exhausted(str(error), held, name)
            if needed is None:
                raise
            seconds = time.monotonic() - begun
            answer = {"held": held, "host": host, "exhausted": needed, "seconds": seconds, "versions": used}
            return {**save(key, answer, {name: str(error)}), "warnings": told, "cached": False}
    seconds = time.monotonic() - begun
    memory = {name: _memory(program, name, held) for name, program in programs.items()}
    answer = {"held": held, "host": host, "memory": memory, "seconds": seconds, "versions": used}
    hlo: dict[str, str] = {}
    try:
        for text, (name, program) in zip(texts, programs.items(), strict=True):
            hlo[name] = tpu_text.text_of(program, text)
        answer["collectives"] = [
            collective for name in PROGRAMS for collective in _collectives(name, hlo[name])
        ]
    except (framework("jax.errors").JaxRuntimeError, ValueError) as error:
        # A newer compiler's text may be unreadable, and loops of unknown length cannot be counted.
        answer["unread"] = " ".join(str(error).split())[:300]
    return {**save(key, answer, hlo), "warnings": told, "cached": False}


def lowered_step(request: dict[str, Any], target: Target) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Sharding plan, abstract state and batch, and the two programs of the step."""
    runtime, jax, np = framework("jax_impl"), framework("jax"), framework("numpy")
    step = StepRequest.from_json(request["step"])
    if step.optimizer.offload and target.platform == "gpu":
        raise PlanError(
            f"target {target.name}: --offload: expected a TPU, since JAX gives absent GPUs no host memory "
            "(Device.addressable_memories() is empty)"
        )
    policy = runtime.ShardingPolicy.parse(request["policy"], request["source"])
    sizes = policy.mesh_sizes(target.devices)
    mesh = jax.sharding.Mesh(np.array(devices_of(target)).reshape(*sizes.values()), tuple(sizes))
    plan = runtime.plan_sharding(
        _model(json.dumps(request["step"])),
        mesh,
        policy,
        stacked=step.stacked,
        engine=request["engine"],
        frozen=step.frozen_paths,
    )
    optimizer = step.optimizer.transformation()
    training = runtime.make_train_step(
        plan, step.loss_function(), optimizer, microbatches=step.workload.microbatches
    )
    offload = runtime.Offload(float(step.optimizer.offload))
    state, batch = runtime.abstract_state(plan, optimizer, offload=offload), step.global_batch(plan)
    return plan, state, batch, training.lower_programs(state, batch)


@functools.lru_cache(1)
def _model(step: str) -> Any:
    """Cached for the rows of a table, which share it: making many layers takes longer than lowering a scanned step."""
    return StepRequest.from_json(json.loads(step)).abstract_model()


def _memory(program: Any, name: str, held: dict[str, int]) -> dict[str, int]:
    """Bytes on one device. ``beside``: alive, but no argument of the program. ``peak``: alive during the program."""
    allocated = compiled_leg.allocated(program)
    arguments = {
        "gradients": ("weights", "batch", "variables"),
        "update": ("weights", "moments", "gradients"),
    }[name]
    alive = sum(size for kind, size in held.items() if name == "update" or kind != "gradients")
    # Frozen weights may be missing from a program's arguments, but are alive all the same.
    left_out = max(0, sum(held[kind] for kind in arguments) - allocated["arguments"])
    beside = alive - sum(held[kind] for kind in arguments) + left_out
    own = allocated.pop("total")
    return {**allocated, "beside": beside, "peak": own + beside}


def _collectives(program: str, text: str) -> list[dict[str, Any]]:
    scheduled = part("jax", "diagnostics.scheduled")
    return [
        {
            "program": program,
            "kind": collective.kind,
            "arrays": [{"dtype": array.dtype, "size": array.size} for array in collective.arrays],
            "times": collective.times,
            "bytes": collective.bytes,
            "overlaps": collective.overlaps,
            "name": collective.name,
        }
        for collective in scheduled.read_collectives(text)
    ]


def _bytes(tree: Any, on_host: bool = False) -> int:
    """Bytes on one device, or of its part in the host's memory."""
    leaves = framework("jax").tree.leaves(tree)
    return compiled_leg.held(leaf for leaf in leaves if (leaf.sharding.memory_kind == _HOST) == on_host)


def exhausted(message: str, held: dict[str, int], program: str) -> int | None:
    """A lower bound of a step's bytes on a device, if a compiler refused it for memory; None for other errors.

    XLA:TPU reports either all bytes of the program, or the bytes of its temporary arrays.
    """
    beside = held["moments"] if program == "gradients" else 0
    if used := re.search(rf"Used {_AMOUNT} of \S+ hbm", message):
        return _amount(used) + beside
    if temporary := re.search(rf"required for HLO temporaries \({_AMOUNT}\) exceeds", message):
        return _amount(temporary) + sum(held.values())
    return sum(held.values()) if "CompileTimeHbmOom" in message else None


def _amount(match: re.Match[str]) -> int:
    return int(float(match[1]) * 2 ** (10 * "BKMGT".index(match[2] or "B")))


if __name__ == "__main__":
    main()
