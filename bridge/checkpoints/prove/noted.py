"""The proof of a conversion in the certificate of its result."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import replace
from pathlib import Path

from bridge.checkpoints.prove.proof import Proof
from bridge.core.formats.files.atomic import fsync_directory
from bridge.core.formats.files.manifest import MANIFEST_FILE, certified, manifest_path, without_certificate


def note_proof(result: Path, proof: Proof) -> None:
    """Add a proof to the certificates of the checkpoint at ``result``. OSError if its manifests cannot be written."""
    numbers = {
        **vars(proof),
        "verdict": proof.verdict,
        "states": [
            # JSON has no infinity.
            {**vars(state), "largest": state.largest if math.isfinite(state.largest) else str(state.largest)}
            for state in proof.states
        ],
    }
    for path in list(result.rglob(MANIFEST_FILE)) if result.is_dir() else [manifest_path(result)]:
        data = path.read_bytes()
        _, certificate, _ = without_certificate(data)
        if certificate is not None:
            # A reader meets the old manifest or the new one, and a power cut leaves one of them.
            working = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
            with working.open("xb") as file:
                file.write(certified(data, replace(certificate, proof=numbers)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(working, path)
            fsync_directory(path.parent)
