"""A second layout planner, written from ``bridge/core/sharding/rules.md`` alone: an oracle without a line of the first.

Nothing here imports ``bridge.core.sharding``; ``test_layout_agreement.py`` holds the two planners together.
"""
