"""Ray's errors, of which there are many and which have no common base class: each is a sentence or a lost worker."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from bridge.checkpoints.jobs.cluster import WorkerLost
from bridge.checkpoints.jobs.ray_cluster import RayCluster
from bridge.core.formats.tensors.base import CheckpointError


class _RayError(Exception):
    pass


class _TaskError(_RayError):
    cause = ValueError("inside")


def _exceptions() -> types.SimpleNamespace:
    names = (
        "WorkerCrashedError",
        "NodeDiedError",
        "ObjectLostError",
        "OutOfMemoryError",
        "LocalRayletDiedError",
    )
    subclasses = {name: type(name, (_RayError,), {}) for name in names}
    return types.SimpleNamespace(RayError=_RayError, RayTaskError=_TaskError, **subclasses)


class _Remote:
    def remote(self, *_: object) -> object:
        return object()

    taken = property(lambda self: self)


class FakeRay(types.ModuleType):
    """As much of Ray as the cluster calls; `errors` by the name of the call that fails."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.errors: dict[str, Exception] = {}
        self.exceptions = _exceptions()

    def _call(self, name: str, result: Any = None) -> Any:
        if name in self.errors:
            raise self.errors[name]
        return result

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        self._call("init")

    def cluster_resources(self) -> dict[str, float]:
        return dict(self._call("resources", {"CPU": 4.0}))

    def remote(self, **_: object) -> Any:
        return lambda _: _Remote()

    def get(self, _: object, **__: object) -> object:
        return self._call("get", {})

    def wait(self, handles: list[object], **_: object) -> tuple[list[object], list[object]]:
        return tuple(self._call("wait", (handles[:1], handles[1:])))  # type: ignore[return-value] # two lists

    def shutdown(self) -> None:
        self._call("shutdown")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize("call", ["init", "resources"])
@pytest.mark.parametrize(
    "error", [_RayError("gone\nat line 3"), TimeoutError(), AssertionError("x"), OSError("no")]
)
def test_a_cluster_that_cannot_be_begun_is_a_sentence(ray: FakeRay, call: str, error: Exception) -> None:
    ray.errors[call] = error
    with pytest.raises(CheckpointError) as raised:
        RayCluster(2)
    assert "Ray" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["WorkerCrashedError", "NodeDiedError", "ObjectLostError", "LocalRayletDiedError"]
)
def test_lost_workers_are_told(ray: FakeRay, name: str) -> None:
    cluster = RayCluster(2)
    ray.errors["get"] = getattr(ray.exceptions, name)("gone\nmore")
    with pytest.raises(WorkerLost, match=r"^gone$"):
        cluster.result(object())


@pytest.mark.parametrize(
    "error", [_RayError("raylet"), ConnectionError("GCS"), RuntimeError("x"), KeyError("y")]
)
def test_other_errors_of_running_are_a_sentence(ray: FakeRay, error: Exception) -> None:
    cluster = RayCluster(2)
    ray.errors |= {"get": error, "wait": error, "shutdown": error}
    with pytest.raises(CheckpointError, match=r"Ray failed while running a part: .*run the command again"):
        cluster.result(object())
    with pytest.raises(CheckpointError, match="Ray failed while waiting for a part"):
        cluster.wait([object()], lambda *_: None)
    cluster.close()


def test_a_part_s_own_error_is_named(ray: FakeRay) -> None:
    cluster = RayCluster(2)
    ray.errors["get"] = _TaskError("traceback")
    with pytest.raises(CheckpointError, match=r"a part failed: ValueError\('inside'\)"):
        cluster.result(object())
