"""Converts checkpoints between formats and models."""

from bridge.checkpoints.convert.conversion import ConvertOptions, convert, planned
from bridge.checkpoints.convert.convert_report import ConvertReport

__all__ = ["ConvertOptions", "ConvertReport", "convert", "planned"]
