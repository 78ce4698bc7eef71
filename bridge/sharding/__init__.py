"""The contract both runtimes and the planner share: layouts, strategies, policies. Pure Python, no framework."""
