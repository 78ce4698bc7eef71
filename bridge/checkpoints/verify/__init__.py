"""Reads a whole checkpoint and says which tensors are whole."""

from bridge.checkpoints.verify.verification import verify
from bridge.checkpoints.verify.verify_report import VerifyReport

__all__ = ["VerifyReport", "verify"]
