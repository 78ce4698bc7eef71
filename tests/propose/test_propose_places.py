"""A proposed mapping says where either side keeps weights and moments: what it converts lies as the other side does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.propose.propose import propose
from tests.checkpoints.test_convert import assert_same, tensors
from tests.propose.test_propose import call, saved

WEIGHTS = {
    "embed.weight": (7, 6),
    "layers.0.up.weight": (5, 6),
    "layers.1.up.weight": (5, 6),
    "norm.weight": (6,),
}
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


def section(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(list(name.encode()))
    return {w: rng.standard_normal(shape).astype(np.float32) for w, shape in WEIGHTS.items()}


def torch_names(weights: str, moments: str) -> dict[str, np.ndarray]:
    tensors = {weights.format(w=w): array for w, array in section("weights").items()}
    for moment in MOMENTS:
        tensors |= {f"{moments.format(w=w)}.{moment}": array for w, array in section(moment).items()}
    return tensors | {f"{moments.format(w=w)}.step": np.array(3, np.float32) for w in WEIGHTS}


def jax_names(weights: str, state: str, inside: str, count: str) -> dict[str, np.ndarray]:
    def tree(pattern: str, name: str) -> dict[str, np.ndarray]:
        arrays = section(name)
        return {
            pattern.format(w="embed/embedding"): arrays["embed.weight"],
            pattern.format(w="layers/up/kernel"): np.stack(
                [arrays[f"layers.{i}.up.weight"].T for i in (0, 1)]
            ),
            pattern.format(w="norm/scale"): arrays["norm.weight"],
        }

    arrays = tree(weights, "weights") | {count: np.array(3, np.int32)}
    for moment, word in MOMENTS.items():
        arrays |= tree(f"{state}{word}/{inside}", moment)
    return arrays


TORCH = {
    "usual": torch_names("model.{w}", "optimizer.state.{w}"),
    "no_root": torch_names("{w}", "optim.state.{w}"),
    "wrapped": torch_names("model.module.{w}", "optimizer.state.module.{w}"),
}
JAX = {
    "usual": jax_names("params/{w}", "opt_state/", "{w}", "opt_state/count"),
    "linen_chain": jax_names("params/params/{w}", "opt_state/0/", "params/{w}", "opt_state/0/count"),
    "nnx": jax_names("model/{w}/value", "opt_state/1/0/", "{w}/value", "opt_state/1/0/count/value"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("jax", JAX)
@pytest.mark.parametrize("direction", ["to_jax", "to_torch"])
def test_what_is_converted_by_a_proposal_lies_as_in_the_other_checkpoint(
    tmp_path: Path, torch: str, jax: str, direction: str
) -> None:
    here, there = saved(tmp_path / "a", "dcp", TORCH[torch]), saved(tmp_path / "b", "orbax", JAX[jax])
    a, b = (here, there) if direction == "to_jax" else (there, here)
    proposal = propose(a, b, values=True)
    assert proposal.certain, proposal.text
    (tmp_path / "m.toml").write_text(proposal.text, encoding="utf-8")
    convert(a, tmp_path / "new", mapping=str(tmp_path / "m.toml"))
    assert_same(tensors(tmp_path / "new"), tensors(b))
    assert diff(a, b, mapping=str(tmp_path / "m.toml")).max_ulp == 0


def test_averaged_weights_beside_the_trained_ones_are_not_taken_for_them(tmp_path: Path) -> None:
    averaged = {f"ema.{w}": array + 1 for w, array in section("weights").items()}
    a = saved(tmp_path / "a", "dcp", torch_names("module.{w}", "optimizer.state.{w}") | averaged)
    b = saved(tmp_path / "b", "orbax", JAX["usual"])
    proposal = propose(a, b, values=True)
    assert proposal.certain, proposal.text
    (tmp_path / "m.toml").write_text(proposal.text, encoding="utf-8")
    convert(a, tmp_path / "new", mapping=str(tmp_path / "m.toml"), selection=Selection(drop=("ema.*",)))
    assert_same(tensors(tmp_path / "new"), tensors(b))


def test_a_weight_called_value_is_not_the_key_of_nnx(tmp_path: Path) -> None:
    x = np.arange(6.0)
    a = saved(tmp_path / "a", "dcp", {"model.value": x})
    b = saved(tmp_path / "b", "orbax", {"params/value": x})
    (tmp_path / "m.toml").write_text(propose(a, b, values=True).text, encoding="utf-8")
    convert(a, tmp_path / "new", mapping=str(tmp_path / "m.toml"))
    assert_same(tensors(tmp_path / "new"), tensors(b))


def test_usual_places_are_not_written(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "dcp", TORCH["usual"]), saved(tmp_path / "b", "orbax", JAX["usual"])
    assert "[convention" not in propose(a, b).text


@pytest.mark.parametrize(
    "formats", [("dcp", "safetensors"), ("safetensors", "safetensors"), ("safetensors", "orbax")]
)
def test_flat_weights_of_another_format_stay_flat(tmp_path: Path, formats: tuple[str, str]) -> None:
    def names(side: int) -> Mapping[str, np.ndarray]:
        flat = {(w if side else w.replace("up", "wide")): array for w, array in section("weights").items()}
        return JAX["usual"] if formats[side] == "orbax" else flat

    def kept(side: int) -> Path:
        if formats[side] != "safetensors":
            return saved(tmp_path / f"{side}", formats[side], names(side))
        save_file(dict(names(side)), tmp_path / f"{side}.safetensors")
        return tmp_path / f"{side}.safetensors"

    a, b = kept(0), kept(1)
    proposal = propose(a, b, values=True)
    (tmp_path / "m.toml").write_text(proposal.text, encoding="utf-8")
    new = tmp_path / f"new{b.suffix}"
    convert(a, new, mapping=str(tmp_path / "m.toml"))
    expected = tensors(b)
    assert_same(tensors(new), {name: expected[name] for name in expected if not name.startswith("opt_state")})


def test_several_optimizer_states_are_doubted_aloud(tmp_path: Path) -> None:
    arrays = dict(JAX["usual"])
    for name in [name for name in arrays if name.startswith("opt_state")]:
        array = arrays.pop(name)
        group = "norms" if "norm" in name else "others"
        arrays[re.sub("^opt_state/", f"opt_state/{group}/", name)] = array
    arrays |= {"opt_state/norms/count": np.array(3, np.int32)}
    a, b = saved(tmp_path / "a", "dcp", TORCH["usual"]), saved(tmp_path / "b", "orbax", arrays)
    proposal = propose(a, b, values=True)
    assert not proposal.certain
    assert all(not rule.doubts for rule in proposal.rules)
    counts = "opt_state/norms/count, opt_state/others/count"
    told = f"several optimizer states, which a table cannot express (counts at {counts})"
    assert f"# uncertain: the places of jax: {told}" in proposal.text
    result = call(a, b, "--values", "--out", tmp_path / "m.toml")
    assert result.exit_code == 1
    assert f"uncertain, where B keeps its tensors: {told}" in " ".join(result.stderr.split())
