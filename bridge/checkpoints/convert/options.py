"""The choices of a conversion, as the command line and programs make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import Format, format_named
from bridge.core.mapping.language.rules import MappingLike
from bridge.core.mapping.language.table import Tied


@dataclass(frozen=True)
class ConvertOptions:
    """The choices of a conversion.

    to: "dcp", "orbax" or "safetensors"; default: DCP for an Orbax checkpoint, else Orbax (`convert` goes by the
    destination's name first). mapping: a shipped family's name, a TOML file or a table; without one names pass through
    as tree paths. into, from_: conventions of the
    mapping, where names and format do not say which are meant. axes: sizes for the mapping's axes, over its own table.
    selection: which part of the source. casts: dtypes by patterns of names in the destination. tied: whether a weight
    that has two names is to be there "once" or under "both"; default: as in the source. verify: hold the source to its
    manifest and to the checksums of its format, as far as it is read. any_model: use the mapping whatever model the
    source's `config.json` names. companions: copy `config.json`, tokenizer files and the like along. dequantize: take
    MXFP4 weights and float8 weights with scales of blocks as the bfloat16 numbers that they stand for, see
    `formats/whole/quantized.py`. items: of an Orbax source, see `open_checkpoint`. write_items: keys of the tree that
    become an item each of an Orbax destination. optimizer_order: what torch's numbers in optimizer states stand for:
    "model", or a file with a weight's name on each line, see `numbered_states.py`.
    """

    to: Format | None = None
    mapping: MappingLike | None = None
    into: str | None = None
    from_: str | None = None
    axes: Mapping[str, int] | None = None
    selection: Selection = field(default_factory=Selection)
    casts: Sequence[str] = ()
    tied: Tied | None = None
    verify: bool = True
    any_model: bool = False
    companions: bool = True
    dequantize: bool = False
    items: Sequence[str] = ()
    write_items: Sequence[str] = ()
    optimizer_order: str | None = None

    def __post_init__(self) -> None:
        if self.to is not None:
            format_named(self.to)
        if self.write_items and self.to not in (None, "orbax"):
            raise ValueError(f"expected format orbax, which has items, for write_items, got {self.to!r}")
