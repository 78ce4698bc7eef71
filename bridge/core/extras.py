"""Optional packages: the commands that install what is missing."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec


def install_advice(*extras: str) -> str:
    """The commands that install ``extras``, such as "torch": in a clone, and without one from the packages' own index.

    Twinshard itself is on no index, so ``pip install 'twinshard[torch]'`` would fail.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("twinshard") or []
    except PackageNotFoundError:  # imported from the sources, without an installation
        requirements = []
    # As in "torch<3,>=2.11; extra == 'torch'".
    wanted = [
        f"'{text.partition(';')[0].strip()}'"
        for text in requirements
        if any(f"extra == '{extra}'" in text.replace('"', "'") for extra in extras)
    ]
    elsewhere = f"; without a clone: pip install {' '.join(wanted)}" if wanted else ""
    return f"pip install '.[{','.join(extras)}]' in a clone of Twinshard{elsewhere}"


def installed_versions(*packages: str) -> dict[str, str]:
    """The versions of those of ``packages`` that are installed, by name."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def why_no_pictures() -> str | None:
    """Why no picture can be drawn here; None where matplotlib is installed."""
    if find_spec("matplotlib") is not None:
        return None
    return f"pictures need matplotlib, which is not installed: {install_advice('pictures')}"
