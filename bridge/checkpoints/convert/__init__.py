"""Converts checkpoints between formats and models."""

from bridge.checkpoints.convert.conversion import ConvertReport, convert
from bridge.checkpoints.convert.plan import ConvertOptions, planned

__all__ = ["ConvertOptions", "ConvertReport", "convert", "planned"]
