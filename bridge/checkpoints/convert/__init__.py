"""Converts checkpoints between formats and models."""

from bridge.checkpoints.convert.conversion import convert, planned
from bridge.checkpoints.convert.convert_report import ConvertReport
from bridge.checkpoints.convert.options import ConvertOptions

__all__ = ["ConvertOptions", "ConvertReport", "convert", "planned"]
