"""A conversion notes what it used, so that the way back gives what there was, without an option."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.mapping import MappingError
from tests.mapping.test_config_choices import HEAD, llama, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TITANS = ["torchtitan", "torchtitan_unfused", "torchtitan_fused", "torchtitan_0_2"]
MAXTEXT = {"d": HEAD, "r": 2, "llama3_rope": 1}


def names(path: Path) -> set[str]:
    with open_checkpoint(path) as reader:
        return {*reader.tensors}


@pytest.mark.fast_cases("torchtitan_0_2", "hf")
@pytest.mark.parametrize("convention", [*TITANS, "hf"])
def test_the_way_back_has_the_names_it_came_with(tmp_path: Path, convention: str) -> None:
    source = llama(tmp_path / "hub")
    if convention == "hf":
        model = {n: torch.from_numpy(a) for n, a in weights(source).items()}
        dcp.save({"model": model}, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        convert(source, tmp_path / "a", to="dcp", mapping="llama", into=convention, axes=MAXTEXT)
    report = convert(
        tmp_path / "a", tmp_path / "b", to="orbax", mapping="llama", into="maxtext", axes=MAXTEXT
    )
    assert report.conventions is not None
    assert report.conventions[1] == "maxtext"
    back = convert(tmp_path / "b", tmp_path / "c", mapping="llama")
    assert back.conventions == report.conventions[::-1]
    assert names(tmp_path / "c") == names(tmp_path / "a")
    # A word of the caller goes first.
    other = convert(tmp_path / "b", tmp_path / "d", mapping="llama", into="torchtitan_unfused")
    assert other.conventions == ("maxtext", "torchtitan_unfused")


def test_another_format_is_another_way(tmp_path: Path) -> None:
    """What came from torchtitan in DCP has the Hub's names in safetensors."""
    convert(
        llama(tmp_path / "hub"),
        tmp_path / "a",
        to="dcp",
        mapping="llama",
        into="torchtitan_0_2",
        axes=MAXTEXT,
    )
    convert(tmp_path / "a", tmp_path / "b", to="orbax", mapping="llama", into="maxtext", axes=MAXTEXT)
    report = convert(tmp_path / "b", tmp_path / "c", to="safetensors", mapping="llama")
    assert report.conventions == ("maxtext", "hf")
    assert names(tmp_path / "c") == names(tmp_path / "hub")


def with_adam(path: Path) -> Path:
    """A state dict with Adam's state, as FSDP2 gives it to DCP."""
    shapes = {"layers.0.weight": (3, 4), "layers.1.weight": (3, 4)}
    state = {
        n: {"exp_avg": torch.full(s, 1.0), "exp_avg_sq": torch.full(s, 2.0), "step": torch.tensor(5.0)}
        for n, s in shapes.items()
    }
    model = {n: torch.randn(s) for n, s in shapes.items()}
    dcp.save({"model": model, "optimizer": {"state": state}}, checkpoint_id=path, no_dist=True)
    return path


RULES = """
convention = { torch = {}, jax = { exp_avg = "opt_state/0/mu/{w}" } }
[[rule]]
torch = "layers.{i}.weight : o m"
jax = "layers/{i}/kernel : m o"
"""


def test_a_round_trip_adds_no_empty_parts_and_diff_says_so(tmp_path: Path) -> None:
    source = with_adam(tmp_path / "a")
    (tmp_path / "m.toml").write_text(RULES)
    convert(source, tmp_path / "b", mapping=tmp_path / "m.toml")
    with open_checkpoint(tmp_path / "b") as reader:
        assert {path for path in reader.object_paths.values() if path[0] == "opt_state"} == {
            ("opt_state", 1),
            ("opt_state", 2),
        }
    convert(tmp_path / "b", tmp_path / "c", mapping=tmp_path / "m.toml")
    assert diff(source, tmp_path / "c").within
    # And once more into the tree, which has the parts again.
    convert(tmp_path / "c", tmp_path / "d", mapping=tmp_path / "m.toml")
    assert diff(tmp_path / "b", tmp_path / "d").within
    shown = CliRunner().invoke(app, ["diff", str(source), str(tmp_path / "c")])
    assert shown.exit_code == 0
    assert shown.stdout.rstrip().endswith("all bits agree; within the tolerance of 0 ULP")


def test_the_verdict_tells_tensors_from_other_differences(tmp_path: Path) -> None:
    model = {"w": torch.ones(3)}
    for name, extra in {
        "a": {},
        "b": {"x": None},
        "c": {"lr": 0.1},
        "d": {"lr": 0.2},
        "e": {"v": torch.ones(2)},
    }.items():
        dcp.save({"model": {**model, **extra}}, checkpoint_id=tmp_path / name, no_dist=True)
    for pair, told in {
        ("a", "b"): "places of the tree: 1",
        ("c", "d"): "other values: 1",
        ("a", "e"): "tensors only in B: 1",
    }.items():
        shown = CliRunner().invoke(app, ["diff", *(str(tmp_path / name) for name in pair)])
        assert shown.exit_code == 1
        assert "all bits agree; within the tolerance of 0 ULP; but A and B differ, as listed" in shown.stdout
        assert told in shown.stdout


def test_the_result_line_names_the_conventions(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(RULES)
    command = [
        "convert",
        str(with_adam(tmp_path / "a")),
        str(tmp_path / "b"),
        "--mapping",
        str(tmp_path / "m.toml"),
    ]
    for more in (["--dry-run"], []):
        shown = CliRunner().invoke(app, [*command, *more])
        assert shown.exit_code == 0, shown.output
        assert "names of torch -> jax" in shown.stdout
        assert "note: opt_state is the state of optax.adamw with a constant learning rate" in " ".join(
            shown.stdout.split()
        )


def stacked(source: Path) -> dict[str, torch.Tensor]:
    """Megatron's torch_dist of a Llama with one layer, by hand."""
    w = weights(source)
    layer = "model.layers.0."
    q, k, v = (w[f"{layer}self_attn.{n}_proj.weight"].reshape(2, -1, HEAD, 24) for n in "qkv")
    qkv = np.concatenate([q, k, v], axis=1).reshape(-1, 24)
    fc1 = np.concatenate([w[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    layers = {
        "self_attention.linear_qkv.layer_norm_weight": w[f"{layer}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv,
        "self_attention.linear_proj.weight": w[f"{layer}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": w[f"{layer}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": fc1,
        "mlp.linear_fc2.weight": w[f"{layer}mlp.down_proj.weight"],
    }
    arrays = {f"decoder.layers.{n}": a[None] for n, a in layers.items()}
    arrays |= {
        "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": w["model.norm.weight"],
        "output_layer.weight": w["lm_head.weight"],
    }
    return {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}


def test_megatrons_stacked_layers(tmp_path: Path) -> None:
    source = llama(tmp_path / "hub", {})
    extra = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_1": b"scales"}
    dcp.save({**stacked(source), **extra}, checkpoint_id=tmp_path / "dist", no_dist=True)
    axes = {"d": HEAD, "r": 2}
    report = convert(
        tmp_path / "dist", tmp_path / "hf", to="safetensors", mapping="megatron", into="hf", axes=axes
    )
    assert report.dropped == tuple(extra)
    assert report.conventions == ("megatron_dist", "hf")
    converted = weights(tmp_path / "hf")
    assert converted.keys() == weights(source).keys()
    assert all(np.array_equal(converted[n], a) for n, a in weights(source).items())
    convert(source, tmp_path / "back", to="dcp", mapping="megatron", into="megatron_dist")
    with open_checkpoint(tmp_path / "back") as reader:
        theirs = {n.removeprefix("model."): reader.read(n) for n in reader.tensors}
    assert theirs.keys() == stacked(source).keys()
    assert all(np.array_equal(theirs[n], a.numpy()) for n, a in stacked(source).items())


MEGATRONS = {
    "by layers": lambda w: {
        f"optimizer.state.{m}.{n}": a for n, a in w.items() for m in ("exp_avg", "fp32_param")
    },
    "several": lambda w: {f"chained_0.optimizer.state.exp_avg_sq.{n}": a for n, a in w.items()},
    "buckets": lambda _: {
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
        f".bucket_idx_0.{word}": torch.zeros(9)
        for word in ("exp_avg", "param")
    },
}


@pytest.mark.fast_cases("several")
@pytest.mark.parametrize("state_form", MEGATRONS)
def test_the_state_of_megatrons_distributed_optimizer_is_named(tmp_path: Path, state_form: str) -> None:
    w = stacked(llama(tmp_path / "hub", {}))
    dcp.save(w | MEGATRONS[state_form](w), checkpoint_id=tmp_path / "dist", no_dist=True)
    axes, out = {"d": HEAD, "r": 2}, tmp_path / "hf"
    with pytest.raises(
        MappingError, match=r"state of Megatron's distributed optimizer .*--drop '\*optimizer\.\*'"
    ):
        convert(tmp_path / "dist", out, to="safetensors", mapping="megatron", into="hf", axes=axes)
    without = Selection(drop=("*optimizer.*",))
    convert(
        tmp_path / "dist", out, to="safetensors", mapping="megatron", into="hf", axes=axes, selection=without
    )
    assert names(out) == names(tmp_path / "hub")


def test_layers_in_one_tensor_are_named_where_the_mapping_has_one_for_each(tmp_path: Path) -> None:
    w = stacked(llama(tmp_path / "hub", {}))
    dcp.save(w, checkpoint_id=tmp_path / "dist", no_dist=True)
    with pytest.raises(
        MappingError, match=r"linear_qkv.* of .* stores all layers in one tensor, .*--ckpt-convert-format"
    ):
        convert(tmp_path / "dist", tmp_path / "hf", mapping="qwen3_moe", into="hf", axes={"d": HEAD, "r": 2})
