"""Each package works without the other framework, and the bridge works without both."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = {"torch", "torch_impl"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "jax_impl"}
FORBIDDEN = {"torch_impl": JAX, "jax_impl": TORCH, "bridge": TORCH | JAX}
# These run in a leg's own process, which holds exactly one runtime.
RELAY = ROOT / "bridge" / "relay"
RUNTIME_LEGS = {
    RELAY / "torch_leg.py": TORCH,
    RELAY / "torch_reference.py": TORCH,
    RELAY / "jax_leg.py": JAX,
}
# These call a framework in the process of a leg, and are imported without it.
RUNTIME_CALLS = {ROOT / "bridge" / "compiling" / "machines" / "compilers.py"}
# What sharding may import: names of dtypes, the limits that every text file is read with, words of messages, and views,
# which import jinja2 when a notebook asks for one.
BELOW = {"bridge.core.dtype_names", "bridge.core.text", "bridge.core.text_files", "bridge.core.views"}
# These hold one framework's side of a pair of models, or of a conversion.
PAIR = ROOT / "bridge" / "parity"
RUNTIME_SIDES = {
    ROOT / "bridge" / "checkpoints" / "prove" / "torch_step.py": TORCH,
    ROOT / "bridge" / "checkpoints" / "prove" / "optax_step.py": JAX,
    ROOT / "bridge" / "checkpoints" / "convert" / "tree_reader.py": JAX,
    **dict.fromkeys(PAIR.glob("torch/*.py"), TORCH),
    **dict.fromkeys(PAIR.glob("jax/*.py"), JAX),
    ROOT / "bridge" / "examples" / "files" / "parity" / "torch_model.py": TORCH,
    ROOT / "bridge" / "examples" / "files" / "parity" / "jax_model.py": JAX,
}


def modules(package: str) -> list[Path]:
    return [
        path for path in sorted((ROOT / package).rglob("*.py")) if path not in {*RUNTIME_LEGS, *RUNTIME_SIDES}
    ]


def imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add((node.module or "").split(".")[0])
    return modules


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_names_the_other_framework_in_an_import(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        assert path in RUNTIME_CALLS or not imported(path) & FORBIDDEN[package], path


def test_a_leg_imports_one_runtime_only() -> None:
    for path, own in RUNTIME_LEGS.items():
        modules = imported(path)
        assert modules & own, path
        assert not modules & (TORCH | JAX) - own


def test_a_side_of_a_pair_imports_its_own_runtime_at_most() -> None:
    assert {PAIR / "torch" / "side.py", PAIR / "jax" / "side.py"} <= set(RUNTIME_SIDES)
    for path, own in RUNTIME_SIDES.items():
        assert not imported(path) & (TORCH | JAX) - own, path


def test_sharding_imports_the_standard_library_numpy_itself_and_what_is_below_only() -> None:
    paths = modules("bridge/core/sharding")
    assert len(paths) > 10
    for path in paths:
        outside = imported(path) - set(sys.stdlib_module_names) - {"numpy"}
        assert outside <= {"bridge"}, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.startswith("bridge") and name not in BELOW]
            assert all(name.startswith("bridge.core.sharding") for name in ours), path
    for name in sorted(BELOW):
        outside = imported(ROOT / f"{name.replace('.', '/')}.py") - set(sys.stdlib_module_names)
        assert outside <= {"numpy", "bridge", *(["jinja2"] if name == "bridge.core.views" else [])}, name


def test_the_second_planner_shares_no_code_with_the_first() -> None:
    for path in modules("tests/sharding/second_planner"):
        assert not imported(path) & {"bridge", *TORCH, *JAX}, path


@pytest.mark.fast_cases("jax_impl", "bridge")
@pytest.mark.parametrize("package", FORBIDDEN)
def test_every_module_imports_while_the_other_framework_is_missing(package: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules(package)
    ]
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(FORBIDDEN[package])!r}))\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch_impl", "jax_impl"])
def test_the_tests_of_a_package_import_while_the_other_framework_is_missing(package: str) -> None:
    script = (
        "import sys, pytest\n"
        f"sys.modules.update(dict.fromkeys({sorted(FORBIDDEN[package])!r}))\n"
        f"sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests/{package}']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize(
    ("package", "framework", "message"),
    [
        ("torch_impl", "torch", "torch_impl needs PyTorch, which is not installed: pip install '.[torch]'"),
        ("jax_impl", "jax", "jax_impl needs JAX, which is not installed: pip install '.[jax]'"),
    ],
)
def test_a_package_without_its_framework_names_the_extra(package: str, framework: str, message: str) -> None:
    script = (
        "import importlib, sys\n"
        f"sys.modules[{framework!r}] = None\n"
        "try:\n"
        f"    importlib.import_module({package!r})\n"
        "except ImportError as error:\n"
        f"    assert str(error).startswith({message!r}), error\n"
        "    assert isinstance(error.__cause__, ModuleNotFoundError), error.__cause__\n"
        f"    assert error.__cause__.name == {framework!r}, error.__cause__\n"
        "else:\n"
        "    sys.exit('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("package", "framework"), [("torch_impl", "torch.distributed"), ("jax_impl", "jax")])
def test_a_package_blames_its_framework_only_if_all_of_it_is_missing(package: str, framework: str) -> None:
    part = f"{framework}.sharding" if framework == "jax" else framework
    script = f"import sys\nsys.modules[{part!r}] = None\nimport {package}\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ModuleNotFoundError" in done.stderr
    assert part in done.stderr
    assert "pip install" not in done.stderr


# Loaded before the package, so that their functions can be compared.
FRAMEWORK_MODULES = {
    "torch_impl": [
        "torch.distributed._state_dict_utils",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.optim",
        "torch.utils.checkpoint",
    ],
    "jax_impl": ["flax.linen", "flax.nnx", "jax", "optax"],
}


@pytest.mark.fast_cases("jax_impl")
@pytest.mark.parametrize("package", FRAMEWORK_MODULES)
def test_importing_a_package_wraps_no_function_of_its_framework(package: str) -> None:
    frameworks = sorted({name.split(".")[0] for name in FRAMEWORK_MODULES[package]})
    script = f"""
import importlib, inspect, sys

def functions():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] not in {frameworks!r}:
            continue
        for key, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == name:
                found.update({{(name, key, attribute): one for attribute, one in vars(value).items() if callable(one)}})
            if callable(value):
                found[name, key] = value
    return found

for name in {FRAMEWORK_MODULES[package]!r}:
    importlib.import_module(name)
before = functions()
import {package}
after = functions()
changed = sorted(name for name, one in before.items() if name in after and after[name] is not one)
assert not changed, changed
# Of the modules that only the package loads.
folder = importlib.import_module({package!r}).__path__[0]
codes = {{name: one.__code__ for name, one in after.items() if inspect.isfunction(one)}}
ours = sorted(name for name, code in codes.items() if code.co_filename.startswith(folder))
assert not ours, ours
print(len(before))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("extra", "absent"), [("torch", "jax"), ("jax", "torch")])
def test_a_package_passes_its_tests_in_an_environment_without_the_other_framework(
    tmp_path: Path, extra: str, absent: str
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    models = (
        ("orbax-checkpoint", "equinox", "dm-haiku", "safetensors") if extra == "jax" else ("transformers",)
    )
    tools = ["pytest", "pytest-timeout", "hypothesis", *models]
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "-e", f"{ROOT}[{extra}]"]
    subprocess.run([*install, *tools], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    missing = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, text=True, env=env)
    assert "ModuleNotFoundError" in missing.stderr, f"{absent} is installed, so this would prove nothing"
    suite = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"tests/{extra}_impl",
        "tests/test_ranks.py",
    ]
    done = subprocess.run(suite, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
