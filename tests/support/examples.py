"""The number of hypothesis examples: ``make test`` runs a few, always the same, and ``make test-all`` runs all."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("fast", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("all", deadline=None)
settings.load_profile("fast")


def examples(count: int = 100, **options: Any) -> settings:
    """Settings of a property with ``count`` examples. Only ``--hypothesis-profile all`` tries all of them."""
    few = settings.get_current_profile_name() == "fast"
    return settings(max_examples=max(10, count // 10) if few else count, **options)
