"""Traced programs: gathers moved ahead, residuals dropped, buffers donated."""
