"""What a pickle is read as: plain Python values, inert records of what it names, and which names may occur.

`pickle.py` makes these, and `pickle_writer.py` writes them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bridge.formats.plain import plain_value

ORDERED_DICT: Final = "collections.OrderedDict"
GETATTR: Final = "builtins.getattr"


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant by its dotted name, such as torch.float32."""

    dotted: str


# Not frozen, which would take three times as long to make: there are six for each tensor.
@dataclass(slots=True, eq=False)
class Call:
    """`name(*args)`, not called. state: what would have been given to its result."""

    name: str
    args: tuple[object, ...]
    state: object = None


@dataclass(slots=True, eq=False)
class Instance:
    """An object of class `name` with this pickled state; compared by identity."""

    name: str
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something stored beside the pickle."""

    id: object


@dataclass(frozen=True)
class Vocabulary:
    """The allowed contents of a kind of pickle: names of calls, instances, constants; persistent ids; its size.

    enumerations: of ``calls``, the classes whose members may be named instead: Python before 3.11.4 writes a member as
    ``getattr(enumeration, name)``, later versions as ``enumeration(value)``.
    foreign: whether other names may occur, too. They stay names: what is made of them is a Call or an Instance.
    """

    max_bytes: int
    calls: frozenset[str] = frozenset()
    instances: frozenset[str] = frozenset()
    constants: re.Pattern[str] | None = None
    persistent: bool = False
    enumerations: frozenset[str] = frozenset()
    foreign: bool = False

    def knows(self, dotted: str) -> bool:
        """Whether this name may occur."""
        if self.foreign:
            return True
        if dotted in self.calls or dotted in self.instances or (dotted == GETATTR and self.enumerations):
            return True
        return self.constants is not None and self.constants.fullmatch(dotted) is not None


# What protocol 2 makes of bytes: codecs.encode(text, "latin1"), and bytes() for none.
_BYTES: Final = frozenset({"__builtin__.bytes", "builtins.bytes"})
PLAIN_VALUES = Vocabulary(max_bytes=16 << 20, calls=frozenset({ORDERED_DICT, "_codecs.encode"}) | _BYTES)


def plain_from_pickle(value: object, what: str) -> object:
    """What `read_pickle` returned, as a plain value; descriptions of bytes become bytes. See `plain_value`."""
    return plain_value(value, what, foreign=_bytes_or_name)


def is_bytes(node: object) -> bool:
    """Whether this is the description of bytes."""
    return isinstance(node, Call) and (node.name in _BYTES or node.name == "_codecs.encode")


def _bytes_or_name(node: object) -> bytes | str:
    match node:
        case bytes():
            return node
        case Call(name=name, args=()) if name in _BYTES:
            return b""
        case Call(name="_codecs.encode", args=(str(text), "latin1")):
            with suppress(UnicodeEncodeError):
                return text.encode("latin1")
            return node.name
        case Call() | Instance():
            return node.name
        case Name():
            return node.dotted
    return type(node).__name__
