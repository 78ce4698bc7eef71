"""Templates without values: trees in memory, shapes of `jax.eval_shape`, and torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bridge import CheckpointError, ConvertOptions, Selection, convert, open_checkpoint, prove
from bridge.checkpoints.convert.plan import conversion_key, planned
from bridge.checkpoints.convert.tree_reader import TreeReader
from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.tensors.leaves import tree_kinds
from tests.support.bridge.torch_layouts import LAYOUTS
from tests.support.bridge.trainings import CHAINS, MAPPING, Model, OptaxTraining, TorchTraining, adamw, batch
from tests.support.bridge.verify_files import contents
from tests.support.ranks import RankGroup

PARAMS = {"first": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}, "last": [jnp.ones(2), {}]}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def described(reader: CheckpointReader) -> dict[str, Any]:
    tensors = {name: (info.path, info.shape, info.dtype) for name, info in reader.tensors.items()}
    values = {name: reader.read(name).tolist() for name in reader.tensors}
    objects = {name: (reader.object_paths[name], reader.objects[name]) for name in reader.objects}
    return {"tensors": tensors, "values": values, "objects": objects, "kinds": tree_kinds(reader)}


@jax.tree_util.register_pytree_node_class
class Own:
    """A class of the program's own, whose leaves have positions and no names."""

    def __init__(self, *leaves: Any) -> None:
        self.leaves = leaves

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.leaves, None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, ...]) -> Own:
        return cls(*leaves)


def trees() -> dict[str, object]:
    further = {
        "step": 3,
        "rate": 2.5,
        "done": True,
        "note": "text",
        "none": None,
        "list": [],
        "tuple": (),
        "key": jax.random.key(1, impl="rbg"),
        "old": jax.random.PRNGKey(1),
        "scalar": np.float32(2),
        "host": np.arange(3),
    }
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return {
        "ints": {7: jnp.ones(1)},
        "own": {"a": Own(jnp.ones(2), 3)},
        **{str(chain): {"params": PARAMS, "opt_state": chain.optax().init(PARAMS)} for chain in CHAINS},
        "further": further,
        "nnx": {"model": nnx.state(model), "opt": nnx.state(optimizer)},
        "pure": nnx.to_pure_dict(nnx.state((model, optimizer))),
    }


@pytest.mark.parametrize("name", list(trees()))
def test_a_tree_is_read_as_stock_orbax_saves_it(tmp_path: Path, name: str) -> None:
    tree = trees()[name]
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    with open_checkpoint(tmp_path / "saved") as saved, TreeReader(tree) as reader:
        assert described(reader) == described(saved)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    side = TorchTraining(CHAINS[0], seed=1)
    side.train(0, 3)
    LAYOUTS[0].write(side.model, side.optimizer, tmp_path / "source")
    return tmp_path / "source"


def initial(chain: Any = CHAINS[0]) -> dict[str, Any]:
    params = OptaxTraining(chain, TorchTraining(chain, seed=2).weights()).params
    return {"params": params, "opt_state": chain.optax().init(params)}


def test_shapes_are_enough_where_the_source_has_values(tmp_path: Path, source: Path) -> None:
    tree = initial()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "like", tree)
    convert(source, tmp_path / "by_file", mapping=MAPPING, like=tmp_path / "like")
    shapes = jax.eval_shape(lambda: tree)
    for name, like in {"by_tree": tree, "by_shapes": shapes}.items():
        convert(source, tmp_path / name, mapping=MAPPING, like=like)
        assert contents(tmp_path / name) == contents(tmp_path / "by_file")
    assert prove(source, tmp_path / "by_shapes", ConvertOptions(mapping=MAPPING, like=shapes))
    with ocp.StandardCheckpointer() as standard:
        state = standard.restore(tmp_path / "by_shapes", shapes)
    adamw().update(state["params"], state["opt_state"], state["params"])
    assert int(state["opt_state"][0].count) == 3


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 3, param_dtype=jnp.float64, rngs=rngs)
        self.last = nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def test_an_nnx_optimizer_goes_on_where_torch_stopped(tmp_path: Path, source: Path) -> None:
    def start() -> tuple[Net, nnx.Optimizer[Net]]:
        model = Net(nnx.Rngs(5))
        return model, nnx.Optimizer(
            model, optax.chain(optax.clip_by_global_norm(9.0), adamw()), wrt=nnx.Param
        )

    def state_of(model: Net, optimizer: nnx.Optimizer[Net]) -> dict[str, nnx.State]:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    shapes = nnx.eval_shape(lambda: state_of(*start()))
    report = convert(source, tmp_path / "a", mapping=MAPPING, like=shapes)
    assert report.filled == {"optimizer/step/value": "the source's step, 3"}
    model, optimizer = start()
    with ocp.StandardCheckpointer() as standard:
        state = standard.restore(tmp_path / "a", shapes)
    nnx.update(model, state["model"])
    nnx.update(optimizer, state["optimizer"])
    torch_side = TorchTraining(CHAINS[0], seed=1)
    torch_side.train(0, 3)
    losses = []
    for step in range(3, 8):
        x, y = batch(step)
        loss, gradients = nnx.value_and_grad(lambda net, x=x, y=y: jnp.mean((net(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        losses.append(float(loss))
    assert losses == pytest.approx(torch_side.train(3, 5), rel=1e-6)


def test_a_shape_without_a_value_anywhere_is_refused_by_name(tmp_path: Path, source: Path) -> None:
    shapes = jax.eval_shape(lambda: {**initial(), "ema": jnp.ones(3)})
    reason = r"ema: expected values, since the source has none; found a shape: give an array"
    with pytest.raises(CheckpointError, match=reason):
        convert(source, tmp_path / "a", mapping=MAPPING, like=shapes)
    report = convert(source, tmp_path / "a", mapping=MAPPING, like={**shapes, "ema": jnp.arange(3.0)})
    assert report.filled == {"ema": "as in the template"}
    with open_checkpoint(tmp_path / "a") as reader:
        assert reader.read("ema").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": {"b": object()}}, r"a/b: expected an array, a shape with a dtype, .*, got object"),
        ({"a": torch.ones(1)}, r"got Tensor \(for a PyTorch state, give the path of a file that torch.save"),
        ({"a": 2**70}, r"a: expected an array, .*, got ndarray"),
        ({"a/b": 1, "a": {"b": 2}}, r"expected a tree of leaves with different names, got 'a/b'"),
        (jnp.ones(1), r"expected a tree of leaves with different names, got ''"),
        ({}, r"expected a tree of leaves with different names, got ''"),
    ],
)
def test_a_tree_that_is_no_template_is_refused_by_name(tree: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        TreeReader(tree)


def test_a_deleted_array_is_refused_by_name() -> None:
    array = jnp.ones(1)
    array.delete()
    with pytest.raises(CheckpointError, match=r"a: expected an array, .*, got a deleted array"):
        TreeReader({"a": array})


def test_a_shape_of_a_key_has_its_implementation() -> None:
    with TreeReader(jax.eval_shape(lambda: {"a": jax.random.key(0, impl="rbg")})) as reader:
        assert (reader.kinds, reader.tensors["a"].shape) == ({"a": "key<rbg>"}, (4,))


def scheduled() -> optax.GradientTransformation:
    return adamw(lambda count: 1e-2 / (1 + count))


@pytest.mark.parametrize(
    ("place", "counts"),
    [
        (lambda params, state: (params, state), ["1/2/count"]),
        (lambda params, state: {"params": params, "tx_state": state}, ["tx_state/2/count"]),
        (
            lambda params, state: {"run": {"params": params, "opt_state": state, "step": 0}},
            ["run/opt_state/2/count", "run/step"],
        ),
        (
            lambda params, state: [{"w": params, "o": {"state": state}, "n": {"step": 0}}],
            ["0/o/state/2/count"],
        ),
    ],
)
def test_counts_follow_wherever_the_optimizers_state_is(
    tmp_path: Path, source: Path, place: Any, counts: list[str]
) -> None:
    params = initial()["params"]
    report = convert(source, tmp_path / "a", mapping=MAPPING, like=place(params, scheduled().init(params)))
    filled = {name: content for name, content in report.filled.items() if content != "as in the template"}
    assert filled == dict.fromkeys(counts, "the source's step, 3")
    # The state of another optimizer is as unwelcome there as elsewhere.
    for other, said in ((optax.amsgrad(1e-2), "nu_max"), (optax.sgd(0.1, momentum=0.9), "another optimizer")):
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "b", mapping=MAPPING, like=place(params, other.init(params)))


def test_numbers_of_a_template_that_may_mean_either_weight_are_refused(tmp_path: Path) -> None:
    weights = {name: {"kernel": jnp.eye(3), "bias": jnp.ones(3)} for name in ("first", "last")}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", {"params": weights, "opt_state": adamw().init(weights)})
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, dtype=torch.float64) for name in weights})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(1, 3, dtype=torch.float64)).sum() for layer in model.values()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "like.pt")
    options: dict[str, Any] = {"mapping": MAPPING, "like": tmp_path / "like.pt"}
    with pytest.raises(CheckpointError, match=r"nothing tells which number .*--optimizer-order model"):
        convert(tmp_path / "source", tmp_path / "a", **options)
    convert(tmp_path / "source", tmp_path / "a", optimizer_order="model", **options)
    with open_checkpoint(tmp_path / "a") as reader:
        assert reader.read("optimizer.state.2.exp_avg").tolist() == np.zeros((3, 3)).tolist()
    # Without the source's state, the template's begins anew.
    report = convert(tmp_path / "source", tmp_path / "b", selection=Selection(weights_only=True), **options)
    assert report.filled["optimizer.state.2.exp_avg"] == "as in the template"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [None, "once", "both"])
def test_both_names_of_a_tied_weight_get_the_sources_values(tmp_path: Path, tied: Any, device: str) -> None:
    rules = [
        {"torch": "embed.weight : v m", "jax": "embed/embedding : v m"},
        {
            "torch": "head.weight : v m",
            "jax": "head/kernel : m v",
            "optional": True,
            "tied_to": "embed.weight",
        },
    ]
    table = jnp.arange(12.0).reshape(4, 3)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", {"params": {"embed": {"embedding": table}}})
    weight = torch.zeros(4, 3, dtype=torch.float64, device=device)
    torch.save({"model": {"embed.weight": weight, "head.weight": weight}}, tmp_path / "like.pt")
    options: dict[str, Any] = {"mapping": {"rule": rules}, "tied": tied}
    report = convert(tmp_path / "source", tmp_path / "a", like=tmp_path / "like.pt", **options)
    assert report.filled == {}
    with open_checkpoint(tmp_path / "a") as reader:
        for name in ("model.embed.weight", "model.head.weight"):
            assert np.array_equal(reader.read(name), table)


def meta_of_fsdp(path: str) -> None:
    with torch.device("meta"):
        model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    torch.save({"model": model.state_dict()}, path)


def test_shards_on_the_meta_device_are_a_template(tmp_path: Path, ranks: RankGroup) -> None:
    ranks.run(1, meta_of_fsdp, str(tmp_path / "meta.pt"))
    side = OptaxTraining(CHAINS[0], TorchTraining(CHAINS[0], seed=1).weights())
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", {"params": side.params})
    convert(tmp_path / "source", tmp_path / "a", mapping=MAPPING, like=tmp_path / "meta.pt")
    with open_checkpoint(tmp_path / "a") as reader:
        assert np.array_equal(reader.read("model.first.weight"), side.params["first"]["kernel"].T)


def test_a_template_with_other_values_is_another_conversion(source: Path) -> None:
    keys = []
    for number in (1.0, 1.0, 2.0):
        tree = {**initial(), "ema": jnp.full(3, number)}
        with planned(source, ConvertOptions(mapping=MAPPING, like=tree)) as (conversion, _):
            keys.append(conversion_key(conversion))
    assert keys[0] == keys[1] != keys[2]


def test_the_meta_device_is_a_template(tmp_path: Path) -> None:
    chain = CHAINS[0]
    side = OptaxTraining(chain, TorchTraining(chain, seed=1).weights())
    side.train(0, 3)
    side.save(tmp_path / "source")
    with torch.device("meta"):
        model = Model()
        optimizer = chain.torch(chain.groups(model))
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "meta.pt")
    options: dict[str, Any] = {"mapping": MAPPING, "optimizer_order": "model"}
    convert(tmp_path / "source", tmp_path / "result", like=tmp_path / "meta.pt", **options)
    torch_side = TorchTraining(chain, seed=1)
    torch_side.train(7, 1)
    real = {"model": torch_side.model.state_dict(), "optimizer": torch_side.optimizer.state_dict()}
    torch.save(real, tmp_path / "real.pt")
    convert(tmp_path / "source", tmp_path / "expected", like=tmp_path / "real.pt", **options)
    assert contents(tmp_path / "result") == contents(tmp_path / "expected")

    with open_checkpoint(tmp_path / "meta.pt") as reader:
        assert reader.tensors["model.first.weight"].shape == (3, 4)
        with pytest.raises(CheckpointError, match="meta device, which has a shape, but no elements"):
            reader.read("model.first.weight")
    with pytest.raises(CheckpointError, match="meta device"):
        convert(tmp_path / "meta.pt", tmp_path / "never")
    torch.save({**state, "ema": {"a": torch.ones(2, device="meta")}}, tmp_path / "more.pt")
    with pytest.raises(CheckpointError, match=r"ema\.a: a tensor on PyTorch's meta device"):
        convert(tmp_path / "source", tmp_path / "never", like=tmp_path / "more.pt", **options)
    weights = Selection(weights_only=True)
    with pytest.raises(CheckpointError, match=r"optimizer.*: a tensor on PyTorch's meta device"):
        convert(tmp_path / "source", tmp_path / "b", like=tmp_path / "meta.pt", selection=weights, **options)
