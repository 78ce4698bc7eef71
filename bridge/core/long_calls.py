"""What long calls share: their progress at a terminal or in a notebook, and a pause of the search for cycles."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

Follow = Callable[..., None] | Literal[False] | None
"""The caller's function, False for silence, or None for a bar of tqdm."""
_DELAY = 1.0  # Seconds. A call that ends earlier shows no bar.

# The switch is per process: the last of several users turns it on again.
_gc_lock = threading.Lock()
_gc_users = 0
_gc_resume = False


def is_watched() -> bool:
    """Whether standard error is a terminal that can rewrite a line, or the output of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return True
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def followed(title: str, progress: Follow) -> Iterator[Callable[..., None] | None]:
    """The function to which a long call reports ``(bytes done, bytes in all, name)`` or the words of a stage.

    If ``progress`` is None, tqdm is installed and someone watches, the function moves a bar of tqdm on standard error.
    Yields None if nobody listens, so that loops over many tensors make no calls.
    """
    if progress is not None or not is_watched():
        yield progress or None
        return
    with warnings.catch_warnings(), ExitStack() as bars:
        # A notebook without ipywidgets gets lines of text, which is no reason for a warning.
        warnings.filterwarnings("ignore", message="IProgress not found")
        try:
            make_bar = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            yield None
            return
        bar: Any = None

        def tell(*news: Any) -> None:
            nonlocal bar
            done, total = news[:2] if len(news) > 1 else (None, None)
            if bar is None:
                looks = {"unit": "B", "unit_scale": True} if total else {"bar_format": "{desc} [{elapsed}]"}
                bar = make_bar(total=total, initial=done or 0, leave=False, delay=_DELAY, **looks)
                bars.enter_context(bar)
            bar.set_description_str(f"{title}: {news[-1]}", refresh=False)
            bar.update(1 if done is None else done - bar.n)

        yield tell


@contextmanager
def collection_paused() -> Iterator[None]:
    """While active, no search for reference cycles. For seconds, not hours: other code may create cycles.

    Tensor descriptions survive anyway. Scanning them again and again took a fifth of the time for many small tensors,
    and tripled the time for reading a pickle.
    """
    global _gc_users, _gc_resume
    with _gc_lock:
        if not _gc_users:
            _gc_resume = gc.isenabled()
            gc.disable()
        _gc_users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if not _gc_users and _gc_resume:
                gc.enable()
