"""Answers of `plan`: comparisons, searches, reports, charts and documents."""
