"""``CausalLM`` by a config.json or a built-in name: planned in both runtimes, and made from shapes in linear time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from bridge.compiling.target_step import StepRequest
from bridge.planning import PlanError, Workload, make_plan, parse_policy, resolve_models
from bridge.planning.models.formulas import Attention
from bridge.planning.models.language_models import abstract_model, causal_lm_config, idle_elements
from bridge.planning.models.runtimes import abstract_module
from bridge.planning.models.shipped_models import shipped_model
from jax_impl import models
from tests.bench.peak_shapes import CONFIGS, model_named

POLICY = parse_policy('[[unit]]\nmatch = "layers.*"\n[[unit]]\nmatch = ""\n', "x")


@pytest.mark.fast_cases("mixtral", "gemma2")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_is_planned_as_causal_lm(tmp_path: Path, name: str) -> None:
    path = Path(model_named(name, tmp_path))
    resolved = resolve_models(str(path))
    for runtime, model in resolve_models(str(path.parent)).items():
        assert replace(model, name=str(path)) == resolved[runtime]
    # Of other families than Llama and Mixtral the layers of Hugging Face are not counted.
    assert set(resolved) == ({"torch", "jax"} if name in ("llama", "mixtral") else {"jax"})
    config = models.CausalLMConfig.from_hf(CONFIGS[name])
    its = nnx.state(nnx.eval_shape(lambda: models.CausalLM(config, rngs=nnx.Rngs(0))), nnx.Param)
    numel = sum(leaf.size for leaf in jax.tree.leaves(its))
    for runtime, model in resolved.items():
        assert model.numel == numel
        plan = make_plan(model, POLICY, 4, runtime, Workload(1, 64))
        assert plan.peak.complete
    if name != "gemma2":
        stacked = resolve_models(str(path), ["jax"], ["layers"])["jax"]
        assert (stacked.parameters, stacked.stacks) == (resolved["jax"].parameters, ("layers",))


def test_attention_can_be_chosen_where_the_family_is_counted(tmp_path: Path) -> None:
    llama, gpt2 = (model_named(name, tmp_path) for name in ("llama", "gpt2"))
    work = Workload(1, 2048)

    def peak(runtime: str, attention: Attention | None) -> int:
        (model,) = resolve_models(llama, [runtime], (), attention).values()
        assert model.attention == (attention or {"torch": "fused", "jax": "plain"}[runtime])
        return make_plan(model, POLICY, 4, runtime, work).peak.total

    for runtime, own in (("torch", Attention.fused), ("jax", Attention.plain)):
        assert peak(runtime, None) == pytest.approx(peak(runtime, own), rel=0.01)
        assert peak(runtime, Attention.fused) < 0.8 * peak(runtime, Attention.plain)
    with pytest.raises(PlanError, match="fused, which is counted only for Llama and Mixtral"):
        resolve_models(gpt2, ["jax"], (), Attention.fused)


def test_a_config_that_cannot_be_built_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (
        ("{", "config.json: expected JSON, .*, got an error at: Expecting"),
        ("[]", "config.json: "),
        (json.dumps({**CONFIGS["llama"], "rope_scaling": {"rope_type": "yarn"}}), "rope_type"),
        (json.dumps({**CONFIGS["llama"], "model_type": "bert"}), "'model_type': expected one of"),
    ):
        path.write_text(content)
        with pytest.raises(PlanError, match=message):
            resolve_models(str(path))
    with pytest.raises(PlanError, match="expected the stack 'layers' or none"):
        resolve_models(model_named("llama", tmp_path), ["jax"], ["blocks"])
    with pytest.raises(PlanError, match="equal windows for a stack"):
        resolve_models(model_named("gemma2", tmp_path), ["jax"], ["layers"])


def test_a_name_of_the_hub_leads_to_the_command_that_fetches_its_configuration() -> None:
    with pytest.raises(PlanError, match=r"hf download org/name config\.json"):
        causal_lm_config("org/name")


def test_built_in_shapes_can_be_compiled_where_causal_lm_can_be_them() -> None:
    for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"):
        step = StepRequest(name, Workload(1, 16), ("layers",))
        if name == "deepseek-v3":
            with pytest.raises(PlanError, match="got one with latent attention and shared experts"):
                step.abstract_model()
            continue
        state = nnx.state(step.abstract_model(), nnx.Param)
        numel = sum(leaf.size for leaf in jax.tree.leaves(state))
        assert numel == shipped_model(name, "jax").numel == shipped_model(name).numel
    with pytest.raises(PlanError, match="--loss, --batch-shapes: expected none"):
        StepRequest("llama3-8b", Workload(), loss="m:f")


def test_making_layers_from_shapes_asks_no_tracer_for_its_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question goes through the whole trace, so that 80 layers took 50 times as long as 10."""
    asked = 0
    sharding: Any = jax.core.Tracer.__dict__["sharding"]

    def counted(tracer: Any) -> Any:
        nonlocal asked
        asked += 1
        return sharding.fget(tracer)

    monkeypatch.setattr(jax.core.Tracer, "sharding", property(counted))
    for layers in (2, 8):
        config = models.DecoderConfig(n_layers=layers)
        for make in (
            lambda rngs, config=config: models.Decoder(config, rngs=rngs),
            lambda rngs, config=config: models.Decoder(config, rngs=rngs, stacked=True),
        ):
            abstract_module(make)
    assert asked == 0
    nnx.eval_shape(lambda: models.Decoder(models.DecoderConfig(n_layers=2), rngs=nnx.Rngs(0)))
    assert asked > 0
    assert abstract_model("decoder:quick", stacked=True).stacked


def test_a_token_leaves_the_experts_idle_to_which_it_does_not_go() -> None:
    # Mixtral 8x7B: 46.7 billion parameters, of which a token uses 12.9 (arXiv 2401.04088, section 2).
    numel = resolve_models("mixtral-8x7b", ("torch",))["torch"].numel
    assert round(numel / 1e9, 1) == 46.7
    assert round((numel - idle_elements("mixtral-8x7b")) / 1e9, 1) == 12.9
    assert idle_elements("llama3-8b") == idle_elements("decoder:default") == 0
