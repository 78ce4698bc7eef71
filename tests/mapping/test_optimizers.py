"""States of optimizers by what they mean: real optimizers go on in the other library, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable, Plan, make_plan, parse_mapping
from tests.support.bridge.memory_reader import MemoryReader

SHAPES = {"a": (3, 4), "b": (5, 2)}
RATE = 1e-2
STEPS, MORE = 4, 5
"""RAdam adapts from its sixth step on."""


def table(extra: str = "", third: str = "") -> MappingTable:
    names = ["torch", "jax", *([third] if third else [])]
    rules = "".join(
        f'[[rule]]\ntorch = "{n}.weight : o m"\njax = "{n}/kernel : m o"\n'
        + (f'{third} = "other.{n}.weight : o m"\n' if third else "")
        for n in SHAPES
    )
    paths = 'exp_avg = "opt_state/0/mu/{w}"\nmomentum_buffer = "opt_state/0/trace/{w}"\n'
    tables = "".join(f"[convention.{n}]\n{paths if n == 'jax' else ''}" for n in names)
    return parse_mapping(f"{extra}{tables}{rules}", "optimizers.toml")


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {n: rng.normal(size=shape) * (1 + step % 3) for n, shape in SHAPES.items()}


def torch_weights() -> dict[str, torch.nn.Parameter]:
    return {n: torch.nn.Parameter(torch.from_numpy(gradients(99)[n])) for n in SHAPES}


def torch_steps(
    optimizer: torch.optim.Optimizer, weights: dict[str, torch.nn.Parameter], first: int, stop: int
) -> None:
    for step in range(first, stop):
        for name, gradient in gradients(step).items():
            weights[name].grad = torch.from_numpy(gradient)
        optimizer.step(lambda: torch.zeros(()))


def torch_reader(optimizer: torch.optim.Optimizer, weights: dict[str, torch.nn.Parameter]) -> MemoryReader:
    """The state dict of model and optimizer with the weights' names."""
    arrays = {f"model.{n}.weight": w.detach().numpy().copy() for n, w in weights.items()}
    objects: dict[tuple[str | int, ...], object] = {}
    for n, w in weights.items():
        for key, value in optimizer.state.get(w, {}).items():
            if isinstance(value, torch.Tensor):
                arrays[f"optimizer.state.{n}.weight.{key}"] = value.detach().numpy().copy()
            else:
                objects["optimizer", "state", f"{n}.weight", key] = value
    for number, group in enumerate(optimizer.param_groups):
        objects |= {
            ("optimizer", "param_groups", number, key): value
            for key, value in group.items()
            if key != "params"
        }
    return MemoryReader("dcp", arrays, objects)


def jax_tree(weights: dict[str, np.ndarray]) -> Any:
    return {n: {"kernel": jnp.asarray(w.T)} for n, w in weights.items()}


def jax_steps(optimizer: Any, params: Any, state: Any, first: int, stop: int) -> tuple[Any, Any]:
    for step in range(first, stop):
        updates, state = optimizer.update(jax_tree(gradients(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def jax_reader(params: Any, state: Any) -> MemoryReader:
    """As Orbax has them: a state without arrays is None."""

    def is_empty(node: Any) -> bool:
        return hasattr(node, "_fields") and not jax.tree.leaves(node)

    leaves = jax.tree.leaves_with_path({"params": params, "opt_state": state}, is_leaf=is_empty)
    keys = {
        tuple(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path): leaf
        for path, leaf in leaves
    }
    arrays = {"/".join(map(str, path)): np.asarray(leaf) for path, leaf in keys.items() if not is_empty(leaf)}
    return MemoryReader("orbax", arrays, {path: None for path, leaf in keys.items() if is_empty(leaf)})


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def decayed(decay: float, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optimizer, optax.add_decayed_weights(-RATE * decay))


EQUAL: dict[str, tuple[Callable[..., torch.optim.Optimizer], optax.GradientTransformation]] = {
    "Adam": (lambda w: torch.optim.Adam(w, RATE), optax.adam(RATE)),
    "AdamW": (lambda w: torch.optim.AdamW(w, RATE, weight_decay=0.1), optax.adamw(RATE, weight_decay=0.1)),
    "RAdam": (lambda w: torch.optim.RAdam(w, RATE), optax.radam(RATE)),
    "SGD": (lambda w: torch.optim.SGD(w, RATE, momentum=0.9), optax.sgd(RATE, momentum=0.9)),
    "Nesterov": (
        lambda w: torch.optim.SGD(w, RATE, momentum=0.9, nesterov=True),
        optax.sgd(RATE, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.fast_cases("AdamW", "SGD")
@pytest.mark.parametrize("name", EQUAL)
def test_a_training_goes_on_in_the_other_library(name: str) -> None:
    """In float64: in float32 optax's bias correction, 1 - 0.999 ** 5, has five digits."""
    # RAdam's epsilon is added before the bias correction in torch, behind it in optax.
    tolerance = 1e-9 if name == "RAdam" else 1e-13
    with jax.enable_x64(True):
        goes_on_equally(*EQUAL[name], tolerance)


def goes_on_equally(
    make: Callable[..., torch.optim.Optimizer], optimizer: optax.GradientTransformation, tolerance: float
) -> None:
    weights = torch_weights()
    own = make(weights.values())
    torch_steps(own, weights, 0, STEPS)
    reader = torch_reader(own, weights)
    converted = contents(make_plan(reader, "orbax", table()), reader)
    params = {n: {"kernel": jnp.asarray(converted[f"params/{n}/kernel"])} for n in SHAPES}
    state = optimizer.init(params)
    fields = [field for field in ("mu", "nu", "trace") if hasattr(state[0], field)]
    moved = {
        f: {n: {"kernel": jnp.asarray(converted[f"opt_state/0/{f}/{n}/kernel"])} for n in SHAPES}
        for f in fields
    }
    if "mu" in fields:
        moved["count"] = jnp.asarray(converted["opt_state/0/count"])
        assert int(converted["opt_state/0/count"]) == STEPS
    state = (state[0]._replace(**moved), *state[1:])
    torch_steps(own, weights, STEPS, STEPS + MORE)
    params, state = jax_steps(optimizer, params, state, STEPS, STEPS + MORE)
    for n, w in weights.items():
        assert np.abs(np.asarray(params[n]["kernel"]).T - w.detach().numpy()).max() < tolerance

    # The way back, and on.
    reader = jax_reader(params, state)
    converted = contents(make_plan(reader, "dcp", table()), reader)
    again = {n: torch.nn.Parameter(torch.from_numpy(converted[f"model.{n}.weight"].copy())) for n in SHAPES}
    fresh = make(again.values())
    for n, w in again.items():
        keys = {
            k.rpartition(".")[2]: v
            for k, v in converted.items()
            if k.startswith(f"optimizer.state.{n}.weight.")
        }
        fresh.state[w] = {key: torch.from_numpy(np.array(value)) for key, value in keys.items()}
    torch_steps(fresh, again, STEPS + MORE, STEPS + 2 * MORE)
    params, _ = jax_steps(optimizer, params, state, STEPS + MORE, STEPS + 2 * MORE)
    for n, w in again.items():
        assert np.abs(np.asarray(params[n]["kernel"]).T - w.detach().numpy()).max() < tolerance


REFUSED_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam with amsgrad=True": lambda w: torch.optim.AdamW(w, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda w: torch.optim.RMSprop(w, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", REFUSED_TORCH)
def test_a_state_of_torch_without_an_equal_is_refused_by_the_optimizers_name(name: str) -> None:
    weights = torch_weights()
    optimizer = REFUSED_TORCH[name](list(weights.values()))
    torch_steps(optimizer, weights, 0, 2)
    reader = torch_reader(optimizer, weights)
    with pytest.raises(
        MappingError, match=rf"the state of {name} \(.*a\.weight, b\.weight.*--weights-only"
    ) as error:
        make_plan(reader, "orbax", table())
    # One sentence, and not that the model is another one.
    assert "match no rule" not in str(error.value)
    assert "missing" not in str(error.value)


def test_lbfgs_and_optimizers_of_others_are_refused() -> None:
    weights = torch_weights()
    optimizer = torch.optim.LBFGS(list(weights.values()), max_iter=3, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((w - 1) ** 4).sum() for w in weights.values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with pytest.raises(MappingError, match=r"the state of LBFGS"):
        make_plan(torch_reader(optimizer, weights), "orbax", table())
    lion = torch_reader(torch.optim.Adam(weights.values()), weights).arrays
    lion |= {f"optimizer.state.{n}.weight.exp_avg": np.zeros(s, np.float32) for n, s in SHAPES.items()}
    sophia = {f"optimizer.state.{n}.weight.hessian": np.zeros(s, np.float32) for n, s in SHAPES.items()}
    with pytest.raises(
        MappingError, match=r"the state of another optimizer \(hessian of a\.weight, b\.weight\)"
    ):
        make_plan(MemoryReader("dcp", lion | sophia), "orbax", table())
    with pytest.raises(MappingError, match=r"the state of Lion .* \(exp_avg of a\.weight, b\.weight\)"):
        make_plan(MemoryReader("dcp", lion), "orbax", table())


STATES: dict[str, tuple[str, str]] = {
    "bitsandbytes": (
        "state1 qmap1 absmax1",
        r"8-bit optimizer .* \(absmax1, qmap1, state1 of a\.weight, b\.weight\)",
    ),
    "schedule-free": ("z exp_avg_sq", r"a schedule-free optimizer \(z of"),
    "others": ("exp_avg exp_avg_diff neg_pre_grad", r"another optimizer \(exp_avg_diff, neg_pre_grad of a"),
}


@pytest.mark.parametrize("state_name", STATES)
def test_states_of_other_libraries_are_one_sentence(state_name: str) -> None:
    words, message = STATES[state_name]
    arrays = {f"model.{n}.weight": np.zeros(shape, np.float32) for n, shape in SHAPES.items()}
    arrays |= {
        f"optimizer.state.{n}.weight.{word}": np.zeros(shape, np.float32)
        for n, shape in SHAPES.items()
        for word in words.split()
    }
    with pytest.raises(MappingError, match=message) as error:
        make_plan(MemoryReader("dcp", arrays), "orbax", table())
    assert "\n" not in str(error.value)
    # Among state dicts nothing is said of optax.
    with pytest.raises(MappingError, match=r"has no equivalent in hf\. Leave"):
        make_plan(MemoryReader("dcp", arrays), "dcp", table(third="hf"), into="hf")


def adam_with(**options: object) -> MemoryReader:
    weights = torch_weights()
    optimizer = torch.optim.Adam(weights.values())
    torch_steps(optimizer, weights, 0, 2)
    optimizer.param_groups[0] |= options
    return torch_reader(optimizer, weights)


def test_an_option_that_makes_another_moment_refuses_the_state() -> None:
    with pytest.raises(MappingError, match=r"param_groups\.0\.clip_exp is 0\.333: ADOPT's exp_avg is a mean"):
        make_plan(adam_with(clip_exp=0.333), "orbax", table())
    weights = torch_weights()
    optimizer = torch.optim.SGD(weights.values(), RATE, momentum=0.9)
    torch_steps(optimizer, weights, 0, 2)
    for option, reason in {"use_muon": "Muon", "trust_coeff": "LARS"}.items():
        reader = torch_reader(optimizer, weights)
        reader.object_paths["x"], reader.objects["x"] = ("optimizer", "param_groups", 0, option), 0.5
        with pytest.raises(MappingError, match=reason):
            make_plan(reader, "orbax", table())
    # Where the option is off, or is one of the other moment, nothing is said.
    assert (
        len(make_plan(adam_with(use_muon=False, trust_coeff=None, dampening=0.5), "orbax", table()).remarks)
        == 2
    )
    assert len(make_plan(adam_with(trust_coeff=None), "orbax", table()).remarks) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"maximize": True}, "optimizer.param_groups.0.maximize = True"),
        ({"bias_correction": False}, "optimizer.param_groups.0.bias_correction = False"),
        ({"caution": True, "lr_mult": 1.0}, "caution = True, optimizer.param_groups.0.lr_mult = 1.0"),
        ({"bias_correction": True, "fused": True, "initial_lr": 0.1, "param_names": ["a"]}, ""),
    ],
)
def test_options_that_adam_does_not_have_are_said(options: dict[str, object], told: str) -> None:
    said = [r for r in make_plan(adam_with(**options), "orbax", table()).remarks if "options" in r]
    assert [told in remark for remark in said] == ([True] if told else [])


def test_states_of_loaders_and_schedulers_are_no_optimizers() -> None:
    reader = adam_with()
    objects = {
        ("dataloader", "state", "worker_0", "epoch"): 3,
        ("lr_scheduler", "state", "0", "last_epoch"): 3,
        ("trainer", "state", "best", "loss"): 0.5,
    }
    everything = {tuple(path): reader.objects[n] for n, path in reader.object_paths.items()} | objects
    arrays = reader.arrays | {"dataloader.state.0.order": np.arange(3)}
    plan = make_plan(MemoryReader("dcp", arrays, everything), "orbax", table())
    assert "dataloader/state/0/order" in plan.tensors
    assert {path for path, _ in plan.objects.values()} >= objects.keys()


def test_momentum_with_dampening_is_refused() -> None:
    weights = torch_weights()
    optimizer = torch.optim.SGD(weights.values(), RATE, momentum=0.9, dampening=0.5)
    torch_steps(optimizer, weights, 0, 3)
    with pytest.raises(MappingError, match=r"param_groups\.0\.dampening is 0\.5"):
        make_plan(torch_reader(optimizer, weights), "orbax", table())


def test_muons_momentum_is_no_trace_of_optax() -> None:
    weights = torch_weights()
    optimizer = torch.optim.Muon(list(weights.values()), RATE)
    torch_steps(optimizer, weights, 0, 2)
    reader = torch_reader(optimizer, weights)
    with pytest.raises(
        MappingError, match=r"param_groups\.0\.ns_steps is 5: Muon's momentum_buffer is a mean"
    ):
        make_plan(reader, "orbax", table())
    # Our own Muon keeps the same mean in both halves.
    rules = "".join(f'[[rule]]\ntorch = "{n}.weight : o m"\njax = "{n}/kernel : m o"\n' for n in SHAPES)
    assert "opt_state/trace/a/kernel" in make_plan(reader, "orbax", parse_mapping(rules, "own.toml")).tensors


REFUSED_OPTAX: dict[str, tuple[str, Callable[[], Any]]] = {
    "amsgrad": (r"optax\.amsgrad \(nu_max of a/kernel", lambda: optax.amsgrad(RATE)),
    "rmsprop": (r"optax\.rmsprop", lambda: optax.rmsprop(RATE)),
    "rmsprop, momentum": (r"optax\.rmsprop", lambda: optax.rmsprop(RATE, momentum=0.9)),
    "rmsprop, centered": (
        r"expected opt_state/0/count with the moments",
        lambda: optax.rmsprop(RATE, centered=True),
    ),
    "adagrad": (r"optax\.adagrad", lambda: optax.adagrad(RATE)),
    "adadelta": (r"optax\.adadelta", lambda: optax.adadelta(RATE)),
    "adafactor": (r"optax\.adafactor", lambda: optax.adafactor(RATE, min_dim_size_to_factor=2)),
    "lion": (r"optax\.lion or optax\.contrib\.muon", lambda: optax.lion(RATE)),
    "rprop": (r"optax\.rprop", lambda: optax.rprop(RATE)),
    "schedule-free": (r"schedule_free", lambda: optax.contrib.schedule_free_adamw(RATE)),
    "prodigy": (
        r"another optimizer \(exp_avg, exp_avg_sq, grad_sum, params0 of a/kernel",
        lambda: optax.contrib.prodigy(RATE),
    ),
    "adan": (r"another optimizer \(g, m, n, v of a/kernel", lambda: optax.adan(RATE)),
    "ademamix": (r"another optimizer \(m1, m2, nu of a/kernel", lambda: optax.contrib.ademamix(RATE)),
    "lars": (r"optax\.lars or another chain .* \(trace of a/kernel", lambda: optax.lars(RATE)),
    "trace last": (
        r"optax\.lars or another chain .* \(trace of a/kernel",
        lambda: optax.chain(optax.clip(1.0), optax.chain(optax.scale(-RATE), optax.trace(0.9))),
    ),
}


@pytest.mark.fast_cases(
    *(
        "amsgrad",
        "rmsprop, momentum",
        "adafactor",
        "lion",
        "schedule-free",
        "prodigy",
        "adan",
        "lars",
        "trace last",
    )
)
@pytest.mark.parametrize("state_name", REFUSED_OPTAX)
def test_a_state_of_optax_without_an_equal_is_refused_by_the_optimizers_name(state_name: str) -> None:
    message, make = REFUSED_OPTAX[state_name]
    params = jax_tree(gradients(99))
    reader = jax_reader(params, jax.tree.map(np.asarray, make().init(params)))
    with pytest.raises(MappingError, match=message):
        make_plan(reader, "dcp", table())


@pytest.mark.parametrize(
    "make",
    [
        lambda sgd: sgd(RATE),
        lambda sgd: sgd(lambda count: RATE),
        lambda sgd: optax.chain(optax.clip(1.0), sgd(RATE)),
        lambda sgd: optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale(-RATE), optax.clip(1.0)),
        lambda sgd: optax.chain(optax.clip(1.0), sgd(RATE), optax.ema(0.9)),
        lambda sgd: optax.chain(optax.clip(1.0), optax.inject_hyperparams(sgd)(RATE)),
        lambda sgd: optax.MultiSteps(sgd(RATE), 2),
        lambda sgd: optax.apply_if_finite(sgd(RATE), 3),
        lambda sgd: optax.chain(optax.clip(1.0), optax.masked(sgd(RATE), True)),
    ],
)
def test_a_trace_that_the_rate_follows_is_sgds(make: Callable[[Any], Any]) -> None:
    params = jax_tree(gradients(99))
    optimizer = make(lambda rate: optax.sgd(rate, momentum=0.9))
    plan = make_plan(jax_reader(params, jax.tree.map(np.asarray, optimizer.init(params))), "dcp", table())
    assert {f"optimizer.state.{n}.weight.momentum_buffer" for n in SHAPES} <= plan.tensors.keys()


def test_a_word_above_a_root_of_the_weights_tells_the_optimizer() -> None:
    arrays = {f"params/params/{n}/kernel": np.zeros(s[::-1], np.float32) for n, s in SHAPES.items()}
    arrays |= {f"opt_state/0/v_row/params/{n}/kernel": np.zeros(s[1], np.float32) for n, s in SHAPES.items()}
    with pytest.raises(MappingError, match=r"state of optax\.adafactor \(.* of a/kernel, b/kernel\)"):
        make_plan(MemoryReader("orbax", arrays), "dcp", table())


def amsgrad(convention: str = "") -> MemoryReader:
    rng = np.random.default_rng(1)
    arrays = {}
    for n, shape in SHAPES.items():
        w = f"{convention}{n}.weight"
        arrays[f"model.{w}"] = rng.normal(size=shape).astype(np.float32)
        arrays |= {
            f"optimizer.state.{w}.{key}": rng.uniform(size=shape).astype(np.float32)
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        }
        arrays[f"optimizer.state.{w}.step"] = np.asarray(3, np.float32)
    return MemoryReader("dcp", arrays)


def test_amsgrad_stays_itself_among_state_dicts_and_is_adam_without_the_maximum() -> None:
    reader = amsgrad()
    plan = make_plan(reader, "dcp", table(third="hf"), into="hf")
    name = "optimizer.state.other.a.weight.max_exp_avg_sq"
    assert np.array_equal(contents(plan, reader)[name], reader.arrays[name.replace("other.", "")])
    with pytest.raises(MappingError, match=r"--drop '\*\.max_exp_avg_sq'"):
        make_plan(reader, "orbax", table())
    plan = make_plan(reader, "orbax", table('drop = ["*.max_exp_avg_sq"]\n'))
    assert {name.split("/")[2] for name in plan.tensors if name.startswith("opt_state/0/")} == {
        "mu",
        "nu",
        "count",
    }


def test_what_is_taken_for_granted_is_said() -> None:
    params = jax_tree(gradients(99))
    optimizer = optax.MultiSteps(optax.adamw(RATE), 2)
    reader = jax_reader(params, jax.tree.map(np.asarray, optimizer.init(params)))
    plan = make_plan(reader, "dcp", table())
    assert plan.conventions == ("jax", "torch")
    read_as, kept = plan.remarks
    assert read_as.startswith(
        "mu, nu and count (opt_state/inner_opt_state/0/nu/*) read as the state of optax.adam"
    )
    assert "opt_state/acc_grads/a/kernel" in kept
    trace = jax_reader(params, jax.tree.map(np.asarray, optax.sgd(RATE, 0.9).init(params)))
    assert make_plan(trace, "dcp", table()).remarks == (
        "trace (opt_state/0/trace/*) read as the trace of optax.sgd, which sums gradients without the learning rate",
    )


def test_notes_leave_out_empty_parts_alone() -> None:
    reader = adam_with()
    objects = {
        ("opt_state", 1): None,
        ("opt_state", 2): 0.5,
        ("twinshard", "places"): {
            "torch": {
                "weights": "model.{w}",
                "states": [],
                "format": "dcp",
                "added": ["opt_state/1", "opt_state/2"],
            }
        },
    }
    plan = make_plan(reader, "orbax", table())
    tree = MemoryReader("orbax", contents(plan, reader), objects)
    kept = {path for path, _ in make_plan(tree, "dcp", table()).objects.values()}
    assert kept == {("opt_state", 2)}


def test_moments_of_other_shapes_than_their_weights_are_refused() -> None:
    """GaLore keeps moments of a projection of the gradient, NovoGrad one second moment for a whole weight."""
    reader = adam_with()
    galore = {n: a[:2] if n.endswith("exp_avg") and a.ndim > 1 else a for n, a in reader.arrays.items()}
    objects = {tuple(path): reader.objects[n] for n, path in reader.object_paths.items()}
    with pytest.raises(
        MappingError, match=r"moments with other shapes .*a\.weight\.exp_avg.*--weights-only"
    ) as error:
        make_plan(MemoryReader("dcp", galore, objects), "orbax", table())
    assert "\n" not in str(error.value)
    params = jax_tree({n: np.ones(shape, np.float32) for n, shape in SHAPES.items()})
    novograd = jax_reader(params, optax.novograd(RATE).init(params))
    with pytest.raises(MappingError, match=r"moments with other shapes .*nu/a/kernel.*--weights-only"):
        make_plan(novograd, "dcp", table())


def test_a_count_without_moments_may_be_that_of_a_schedule() -> None:
    params = jax_tree({n: np.ones(shape, np.float32) for n, shape in SHAPES.items()})
    state = optax.chain(optax.scale_by_schedule(lambda _: 0.1), optax.scale(-1.0)).init(params)
    with pytest.raises(MappingError, match=r"leave it out \(--drop opt_state/0/count\)"):
        make_plan(jax_reader(params, state), "dcp", table())
