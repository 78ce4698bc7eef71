"""The certificate of a conversion, which the manifest of its result keeps: from what and how the result was made.

{"source": "runs/torch/step_10", "source_format": "dcp", "mapping": "decoder", "conventions": ["torch", "jax"],
 "version": "0.9.0", "digests": {"source": ..., "plan": ..., "manifest": ...}, "filled": {...}, "proof": {...}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WRONG = "the result is wrong"
"""The verdict of a proof that found a difference."""


@dataclass(frozen=True)
class Certificate:
    """What a conversion was, by its own word.

    digests: of the "source", a "template" and an "adapter" (files by name, size and time; of a source with a manifest
    also the "source manifest"), of the "plan" with mapping, selection and casts, and of the result's "manifest".
    mapping: its name, "" without one. conventions: of both sides. filled: the content of leaves that only the template
    has, by name. dropped, rounded: names. cast: as asked for. faults: what was left out as damaged, by name. proof: the
    verdict, libraries and numbers of `--prove`; empty if it was not asked for.
    """

    source: str
    source_format: str
    version: str
    digests: Mapping[str, str]
    mapping: str = ""
    conventions: Sequence[str] = ()
    filled: Mapping[str, str] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    rounded: Sequence[str] = ()
    cast: Sequence[str] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Of the proof."""
        return str(self.proof.get("verdict", "not proven (--prove)"))

    def __str__(self) -> str:
        mapping = f", mapping {self.mapping}" if self.mapping else ""
        names = f", names of {' -> '.join(map(str, self.conventions))}" if self.conventions else ""
        counts = {
            "filled from the template": self.filled,
            "dropped": self.dropped,
            "rounded": self.rounded,
            "left out as damaged": self.faults,
        }
        libraries = ", ".join(map(str, self.proof.get("libraries", ())))
        changes = "".join(f"; {len(names)} {what}" for what, names in counts.items() if names)
        return (
            f"converted from {self.source} ({self.source_format}) by twinshard {self.version}{mapping}{names}"
            f"{changes}; {self.verdict}{f' by {libraries}' if libraries else ''}"
        )


def certificate_from(entry: Mapping[str, Any]) -> Certificate:
    """A certificate from JSON. TypeError or ValueError if it is malformed."""
    certificate = Certificate(**entry)
    like = vars(Certificate("", "", "", {}))
    for name, value in vars(certificate).items():
        expected = list if isinstance(like[name], tuple) else type(like[name])
        if not isinstance(value, expected):
            raise ValueError(f"expected {name} as {expected.__name__}, got {value!r:.40}")
    if not isinstance(certificate.proof.get("libraries", []), list):
        raise ValueError("expected the libraries of a proof as list, got something else")
    return certificate
