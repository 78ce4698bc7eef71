"""Reads a whole checkpoint and reports which tensors are intact."""

from bridge.checkpoints.verify.verification import verify
from bridge.checkpoints.verify.verify_report import VerifyReport

__all__ = ["VerifyReport", "verify"]
