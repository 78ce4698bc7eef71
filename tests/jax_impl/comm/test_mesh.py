import os
import re
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jax_impl
from bridge.core.sharding.policy.mesh_axes import MODEL_AXES, REFUSED_AXES
from jax_impl.comm.mesh import DataParallelMesh, ModelAxes, checked_mesh, data_parallel_mesh, simulate_devices
from tests.support.compiler_effort import inherited_flags


def test_more_devices_than_exist_are_refused():
    with pytest.raises(ValueError, match=f"expected 1 to {len(jax.devices())} devices .*, got 99"):
        data_parallel_mesh(99)
    with pytest.raises(ValueError, match=r"at least one device on each axis, got \{'dp': 0\}"):
        data_parallel_mesh(0)
    with pytest.raises(ValueError, match=r"one or two data-parallel axes.*got \{'a': 1, 'b': 1, 'c': 1\}"):
        data_parallel_mesh({"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize(
    "names", [("a", "b", "c"), ("tp",), ("tp", "dp"), ("dp", "tp", "inner"), ("dp", "tp", "ep", "model"), ()]
)
def test_a_mesh_has_data_parallel_axes_and_then_model_axes(names):
    sizes = dict.fromkeys(names, 1)
    message = r"one or two data-parallel axes, outer to inner, then at most two model axes \(names tp, .*got "
    with pytest.raises(ValueError, match=message + re.escape(str(sizes))):
        checked_mesh(Mesh(np.array(jax.devices()[:1]).reshape([1] * len(names)), names))
    with pytest.raises(ValueError, match=message):
        data_parallel_mesh(sizes)


@pytest.mark.parametrize("name", [*REFUSED_AXES, "CP", "Stage"])
def test_an_axis_of_a_parallelism_that_is_not_built_is_refused(name):
    message = f"mesh: axis '{name}' is named for context or pipeline parallelism, which is not supported"
    with pytest.raises(ValueError, match=message):
        data_parallel_mesh({"dp": 2, name: 2})
    with pytest.raises(ValueError, match=message):
        checked_mesh(jax.make_mesh((2, 2), ("fsdp", name)))


@pytest.mark.parametrize("name", [*MODEL_AXES, "TP", "Tensor"])
def test_model_axes_come_last_and_are_no_levels(name):
    mesh = data_parallel_mesh({"outer": 2, "inner": 2, name: 2})
    assert checked_mesh(mesh) == mesh
    axes = DataParallelMesh.of(mesh)
    assert (axes.names, axes.sizes, axes.shards(2)) == (("inner", "outer"), (2, 2), 4)
    assert ModelAxes.of(mesh).by_name == {name: 2}
    assert axes.spec(1, 1, (name,)) == PartitionSpec(None, ("inner", name))
    assert axes.batch_spec == PartitionSpec(("outer", "inner"))


def test_two_axes_have_neighbouring_devices_on_the_inner_one():
    mesh = data_parallel_mesh({"outer": 2, "inner": 4})
    assert mesh.axis_names == ("outer", "inner")
    assert [device.id for device in mesh.devices[1]] == [4, 5, 6, 7]
    assert checked_mesh(mesh) == mesh


def test_the_explicit_axes_that_make_mesh_gives_by_default_are_accepted():
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Explicit,))
    assert checked_mesh(mesh).axis_types == (AxisType.Auto,)


def mean_square(tree, x):
    return jnp.mean(jnp.tanh(x @ tree["w"]) ** 2)


# By name of the entry point, a use of it with a plan, weights, a state, a step and rows.
USES = {
    "fully_shard": lambda plan, weights, state, step, x: jax_impl.fully_shard(
        {"w": jnp.eye(4)}, plan.mesh, units=[]
    ),
    "plan_sharding": lambda plan, weights, state, step, x: jax_impl.plan_sharding(
        {"w": jnp.eye(4)}, plan.mesh, units=[]
    ),
    "init_sharded": lambda plan, *_: jax_impl.init_sharded(lambda: {"w": jnp.eye(4)}, plan.mesh, units=[]),
    "init_state": lambda plan, weights, *_: jax_impl.init_state(plan, weights, optax.sgd(0.1)),
    "train step": lambda plan, weights, state, step, x: step(state, x),
    "gradients": lambda plan, weights, state, step, x: step.gradients(weights, x),
    "eval step": lambda plan, weights, state, step, x: jax_impl.make_eval_step(plan, mean_square)(state, x),
    "unshard": lambda plan, weights, state, *_: jax_impl.unshard(plan, state),
}


@pytest.fixture(scope="module")
def trained_outside():
    # The mesh of jax.make_mesh, outside of jax.set_mesh.
    plan, weights = jax_impl.fully_shard({"w": jnp.eye(4)}, jax.make_mesh((2,), ("dp",)), units=[])
    step = jax_impl.make_train_step(plan, mean_square, optax.sgd(0.1))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    state = jax_impl.init_state(plan, weights, optax.sgd(0.1))
    state, metrics = step(state, x)
    return plan, jax.tree.map(jnp.copy, state.weights), state, step, x, metrics["loss"]


@pytest.mark.parametrize("name", USES)
def test_entry_points_refuse_explicit_axes_of_set_mesh_in_words(name, trained_outside):
    *arguments, _ = trained_outside
    with (
        jax.set_mesh(jax.make_mesh((2,), ("dp",))),
        pytest.raises(
            ValueError, match=r"jax.set_mesh: expected a mesh with Auto axes.*Explicit axes \['dp'\]"
        ),
    ):
        USES[name](*arguments)


def test_meshes_of_make_mesh_train_outside_of_set_mesh_and_auto_axes_train_inside(trained_outside):
    plan, _, state, step, x, loss = trained_outside
    tree, losses = {"w": jnp.eye(4)}, []
    for _ in range(2):
        value, slopes = jax.value_and_grad(lambda tree: mean_square(tree, x))(tree)
        tree = jax.tree.map(lambda w, g: w - 0.1 * g, tree, slopes)
        losses.append(value)
    with jax.set_mesh(data_parallel_mesh(2)):
        after, metrics = step(jax.tree.map(jnp.copy, state), x)
        unsharded = jax_impl.unshard(plan, after)
    np.testing.assert_allclose([loss, metrics["loss"]], losses, rtol=1e-6)
    np.testing.assert_allclose(unsharded["w"], tree["w"], rtol=1e-5)


def test_simulated_devices_without_the_flags_that_keep_order_are_warned_about(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.warns(RuntimeWarning, match="simulate_devices"):
        checked_mesh(data_parallel_mesh(2))


def test_simulated_devices_with_a_compilation_cache_are_warned_about(tmp_path):
    before = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        with pytest.warns(RuntimeWarning, match=r"can compute NaN, crash or hang. Turn the cache off"):
            checked_mesh(data_parallel_mesh(2))
        jax.config.update("jax_enable_compilation_cache", False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checked_mesh(data_parallel_mesh(2))
    finally:
        jax.config.update("jax_enable_compilation_cache", before[0])
        jax.config.update("jax_compilation_cache_dir", before[1])


def test_devices_cannot_be_simulated_once_jax_runs_with_fewer(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ValueError, match="before 64 devices are simulated"):
        simulate_devices(64)


def test_devices_cannot_be_simulated_once_jax_runs_without_the_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    message = r"without .*cse_barrier_expander,small-while-loop-hoisting .*touches jax.devices\(\)"
    with pytest.raises(ValueError, match=message):
        simulate_devices(2)
    with pytest.warns(RuntimeWarning, match="simulate_devices"):
        checked_mesh(data_parallel_mesh(2))


def test_devices_that_run_with_the_flags_already_are_kept(monkeypatch):
    before = os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", before)
    simulate_devices(2)
    assert os.environ["XLA_FLAGS"] == before


def in_fresh_process(code):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["XLA_FLAGS"] = inherited_flags()
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_simulate_devices_sets_flags_before_jax_runs_and_refuses_a_running_jax():
    result = in_fresh_process(
        """
        import os, jax, jax_impl
        jax_impl.simulate_devices(3)
        assert len(jax.devices()) == 3
        flags = os.environ["XLA_FLAGS"]
        jax_impl.simulate_devices(2)
        assert os.environ["XLA_FLAGS"] == flags
        try:
            jax_impl.simulate_devices(4)
        except ValueError as error:
            assert "runs with 3 CPU devices" in str(error), error
        else:
            raise AssertionError("4 devices of a JAX that runs with 3")
        """
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
def test_the_flags_of_simulate_devices_keep_the_meaning_of_the_strategy():
    result = in_fresh_process(
        """
        from jax_impl import *
        simulate_devices(4)
        import jax
        from flax import nnx
        from jax_impl.models import Decoder
        from tests.jax_impl.diagnostics.test_memory import LAYERED
        from tests.support.jax_impl.tiny import loss, tokens
        plan, weights = fully_shard(Decoder(LAYERED, rngs=nnx.Rngs(0)), data_parallel_mesh(4))
        batch = shard_batch(plan, tokens(4, length=3))
        compiled = jax.jit(make_gradients(plan, loss)).lower(weights, batch).compile()
        text = compiled.as_text()
        print(len(plan.units), text.count(" all-gather(") + text.count(" all-gather-start("))
        largest = max(4 * unit.layout.padded_size for unit in plan.units.values())
        print(largest, compiled.memory_analysis().temp_size_in_bytes)
        """
    )
    assert result.returncode == 0, result.stderr[-2000:]
    units, gathers, largest, temporary = map(int, result.stdout.split())
    assert gathers == 2 * units
    # One unit's weights and gradient at a time. The default schedule keeps a part of the next ones too.
    assert temporary < 2 * largest


def test_the_tests_run_under_the_flags_of_simulate_devices():
    # conftest repeats them, as it must not import JAX where only PyTorch is installed.
    result = in_fresh_process(
        """
        import os
        from jax_impl import simulate_devices
        simulate_devices(8)
        print(os.environ["XLA_FLAGS"])
        """
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(result.stdout.split()) == sorted(os.environ["XLA_FLAGS"].split())


@pytest.mark.slow
def test_twenty_steps_on_eight_simulated_devices_neither_hang_nor_abort():
    # Gathers of all units at once, unordered, abort the simulator within about as many steps.
    result = in_fresh_process(
        """
        from jax_impl import *
        simulate_devices(8)
        from tests.support.jax_impl.tiny import decoder, loss, tokens
        plan, weights = fully_shard(decoder(), data_parallel_mesh(8), strategy="optim_grads")
        optimizer = main_weight_adamw(1e-3)
        state = init_state(plan, weights, optimizer)
        step = make_train_step(plan, loss, optimizer)
        for i in range(20):
            state, metrics = step(state, tokens(8, seed=i))
        print(float(metrics["loss"]))
        """
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert np.isfinite(float(result.stdout))
