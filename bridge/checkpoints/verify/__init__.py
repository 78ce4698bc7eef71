"""Reads a whole checkpoint and says which tensors are whole."""

from bridge.checkpoints.verify.verification import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
