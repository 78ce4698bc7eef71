"""Which part of a saved optimizer state goes where in another one, by names alone."""

from __future__ import annotations

import numpy as np
import pytest

from jax_impl.checkpoint.moments import Tensors, match_moments
from jax_impl.checkpoint.names import ShapeDtype

PARAMETERS = {"layers/0/kernel": (3, 4), "layers/1/kernel": (3, 4), "norm": (4,)}
COUNT = ShapeDtype((), np.dtype(np.int32))


def state(*names: str, shapes: dict[str, tuple[int, ...]] = PARAMETERS) -> Tensors:
    """``mu/*`` is a kind of moments, other names are counts."""
    tensors = {}
    for name in names:
        if name.endswith("*"):
            for path, shape in shapes.items():
                tensors[name[:-1] + path] = (name[:-1] + path, ShapeDtype(shape, np.dtype(np.float32)))
        else:
            tensors[name] = (name, COUNT)
    return tensors


ADAM = ("count", "mu/*", "nu/*")


def below(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}/{name}" for name in names)


@pytest.mark.parametrize(
    ("expected", "found", "places"),
    [
        (ADAM, below("1/0", *ADAM), {"": "1/0/"}),
        (below("1/0", *ADAM), ADAM, {"1/0/": ""}),
        (ADAM, (*below("0", *ADAM), "2/count"), {"": "0/"}),
        ((*below("0", *ADAM), "2/count"), (*below("1/0", *ADAM), "1/2/count"), {"0/": "1/0/", "2/": "1/2/"}),
        (("0/count",), (*below("0", *ADAM), "1/count"), {"0/": "0/"}),
        (("1/0/trace/*",), ("0/trace/*",), {"1/0/": "0/"}),
        (("trace/*",), below("0", *ADAM), {}),
        (below("0", *ADAM), ("0/count", "0/nu/*"), {}),
        (below("0", *ADAM), ("0/count", "0/mu/*"), {}),
        (below("0", *ADAM), ("0/mu/*", "0/nu/*"), {}),
        (below("0", "mu/*"), below("0", *ADAM), {"0/": "0/"}),
        # Without their scales, numbers mean nothing.
        (("mu/*",), ("mu/*", "mu_scale/*"), {}),
        (("mu/*", "mu_scale/*"), ("mu/*",), {}),
        (("mu/*", "mu_scale/*"), below("0", "mu/*", "mu_scale/*"), {"": "0/"}),
        (
            (*below("0", *ADAM), *below("1", *ADAM)),
            (*below("1/0", *ADAM), *below("1/1", *ADAM)),
            {"0/": "1/0/", "1/": "1/1/"},
        ),
        # Of two that are as good, neither is taken: nothing tells which.
        (ADAM, (*below("0", *ADAM), *below("1", *ADAM)), {}),
        (
            (*below("a/inner/0", *ADAM), *below("b/inner/0", *ADAM)),
            (*below("a/inner/1/0", *ADAM), *below("b/inner/1/0", *ADAM)),
            {"a/inner/0/": "a/inner/1/0/", "b/inner/0/": "b/inner/1/0/"},
        ),
        (below("ema", "mu/*"), below("average", "mu/*"), {}),
    ],
)
def test_parts_go_to_the_like_wherever_those_are(
    expected: tuple[str, ...], found: tuple[str, ...], places: dict[str, str]
) -> None:
    own, saved = state(*expected), state(*found)
    assert match_moments(own, saved, PARAMETERS) == {
        name: places[prefix] + name.removeprefix(prefix)
        for name in own
        for prefix in [max((p for p in places if name.startswith(p)), key=len, default=None)]
        if prefix is not None
    }


def test_moments_of_another_shape_or_dtype_are_left_out() -> None:
    own = state(*ADAM)
    saved = dict(state(*ADAM, shapes=PARAMETERS | {"norm": (5,)}))
    name, info = saved["mu/layers/1/kernel"]
    saved["mu/layers/1/kernel"] = (name, info._replace(dtype=np.dtype(np.float16)))
    matched = match_moments(own, saved, PARAMETERS)
    # First and second moments of a parameter go together.
    lacking = {f"{moment}/{path}" for moment in ("mu", "nu") for path in ("norm", "layers/1/kernel")}
    assert own.keys() - matched.keys() == lacking


def test_names_are_those_of_the_whole_checkpoint() -> None:
    own = {"count": ("opt_state/count", COUNT)}
    assert match_moments(own, {"0/count": ("optimizer/0/count/value", COUNT)}, ()) == {
        "opt_state/count": "optimizer/0/count/value"
    }
