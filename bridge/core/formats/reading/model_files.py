"""Which files make up a model: one, or several by an index or by numbers in their names, and small files next to them.

weights.pt                               one file, whatever its name
model/pytorch_model.bin                  the usual name, or the only such file of the directory
model/pytorch_model.bin.index.json       Hugging Face shards: the index says which file holds which tensor
     /pytorch_model-00001-of-00002.bin   without an index: all numbers must be there
     /config.json, tokenizer.json        companions

Numbers in names:

model-00001-of-00002.safetensors    part 1 of 2, whose tensors are in no other part; counted from 1, or from a part 0 on
model_world_size_2_rank_0.pt        rank 0 of 2, with a piece of each tensor
mp_rank_00_model_states.pt          rank 0 of any number; so is consolidated.00.pth
lora_rank_8.pt, fold-1-of-5.pt      not a file's number: ranks are counted from 0, and each fold has a whole model
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.core.formats.reading.weight_index import INDEX_END, read_weight_map
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of

CONFIG_FILE: Final = "config.json"
_NAMES: Final = (
    *(CONFIG_FILE, "*_config.json", "params.json", "preprocessor.json", "modules.json"),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "vocab.bpe", "encoder.json", "chat_template.json", "*.jinja"),
    *("tokenizer.model", "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model"),
    *("*.spm", "*.tiktoken"),
)


def is_companion(name: str) -> bool:
    """Whether a file of this name next to a checkpoint belongs to its model."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES)


_PART: Final = re.compile(r"(?<!\d)(\d{1,9})[-_.]of[-_.](\d{1,9})(?!\d)")
_RUN: Final = re.compile(r"(?:epoch|step|iter|fold|split|run|seed|trial|round|stage)[-_. ]?\Z", re.IGNORECASE)
"""Words before a number that counts training runs or their steps, each of which has its own model."""
_RANK: Final = re.compile(r"(?:\Aconsolidated\.|(?<![a-z])rank[_-]?)(\d{1,6})(?:_(\d{3}))?(?!\d)")
_WORLD: Final = re.compile(r"world_size_(\d{1,6})_rank_(\d{1,6})(?!\d)")
_RANKS_OF_A_PROGRAM: Final = re.compile(rf"\Aconsolidated\.|[a-z]p_rank_|{_WORLD.pattern}")
_SHOWN: Final = 5


@dataclass(frozen=True)
class NumberedFiles:
    """Names that differ only in their numbers, sorted by these numbers.

    of_ranks: whether each file has a piece of the same tensors. wrong: names whose number occurs twice, or is larger
    than the count in the name. num_missing: how many implied names are not among the names; missing: the first of them.
    """

    names: tuple[str, ...]
    of_ranks: bool
    wrong: tuple[str, ...]
    num_missing: int
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every number occurs exactly once."""
        return not (self.num_missing or self.wrong)

    @property
    def problem(self) -> str:
        """What is wrong with the numbers; empty if they are complete."""
        if self.wrong:
            return f"{self.wrong[0]} has a number that occurs twice, or exceeds the count"
        verb = "is" if self.num_missing == 1 else "are"
        return f"{first_of(self.missing, total=self.num_missing)} {verb} missing" if self.num_missing else ""


def is_numbered(name: str) -> bool:
    """Whether a name has the number of a part or of a rank."""
    return bool(_numbers(name)[0])


def numbered_sets(names: Iterable[str]) -> list[NumberedFiles]:
    """The sets that these names belong to; names without such a number belong to none."""
    members: dict[str, dict[str, tuple[int, ...]]] = {}
    counts: dict[str, int | None] = {}
    for name in names:
        spans, count = _numbers(name)
        if spans:
            template = _with(name, spans, ["{}"] * len(spans))
            members.setdefault(template, {})[name] = tuple(int(name[start:stop]) for start, stop in spans)
            counts[template] = count
    sets = [
        _set(numbers, counts[template], of_ranks=_PART.search(template.replace("{}", "0")) is None)
        for template, numbers in members.items()
    ]
    return [files for files in sets if files is not None]


def _numbers(name: str) -> tuple[list[tuple[int, int]], int | None]:
    """Where the numbers of a name are, and how many files the name implies."""
    if (part := _PART.search(name)) and not _RUN.search(name, 0, part.start()):
        return [part.span(1)], int(part[2])
    if world := _WORLD.search(name):
        return [world.span(2)], int(world[1])
    spans = [rank.span(group) for rank in _RANK.finditer(name) for group in (1, 2) if rank[group] is not None]
    return spans, None


def _set(members: dict[str, tuple[int, ...]], count: int | None, *, of_ranks: bool) -> NumberedFiles | None:
    ordered = sorted(members, key=members.__getitem__)
    numbers = set(members.values())
    zeros = (0,) * len(members[ordered[0]])
    if of_ranks and zeros not in numbers and _RANKS_OF_A_PROGRAM.search(ordered[0]) is None:
        return None
    first = 0 if of_ranks or zeros in numbers else 1
    sizes = [max(axis) + 1 for axis in zip(*numbers, strict=True)] if count is None else [count]

    def wanted() -> Iterator[tuple[int, ...]]:
        # `itertools.product` would list each range, and a name can make a range of any length.
        for rank in range(math.prod(sizes)):
            digits = []
            for size in reversed(sizes):
                rank, digit = divmod(rank, size)
                digits.append(first + digit)
            yield tuple(reversed(digits))

    spans, _ = _numbers(ordered[0])
    widths = [stop - start for start, stop in spans]
    missing = itertools.islice((number for number in wanted() if number not in numbers), _SHOWN)
    texts = ([str(n).zfill(width) for n, width in zip(number, widths, strict=True)] for number in missing)
    stops = [first + size for size in sizes]
    inside = {
        number for number in numbers if all(first <= n < stop for n, stop in zip(number, stops, strict=True))
    }
    twice = {a for a, b in itertools.pairwise(ordered) if members[a] == members[b]}
    return NumberedFiles(
        tuple(ordered),
        of_ranks,
        tuple(name for name in ordered if name in twice or members[name] not in inside),
        math.prod(sizes) - len(inside),
        tuple(_with(ordered[0], spans, text) for text in texts),
    )


def _with(name: str, spans: list[tuple[int, int]], texts: list[str]) -> str:
    """A name with its numbers replaced by other texts."""
    for (start, stop), text in zip(reversed(spans), reversed(texts), strict=True):
        name = name[:start] + text + name[stop:]
    return name


@dataclass(frozen=True)
class ModelFiles:
    """The files of a checkpoint, all in one directory.

    weight_map: from the index; index: its name; None without an index. of_ranks: whether files have pieces of tensors.
    """

    directory: Path
    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    of_ranks: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """The index and the files."""
        return tuple(self.directory / name for name in (*((self.index,) if self.index else ()), *self.names))


@dataclass(frozen=True)
class FileKind:
    """How the files of a format are named.

    ends: suffixes of their names. usual: names of preferred files and indexes, in this order. ignored: names of
    other files with these suffixes that programs write next to a model. rank: prefix of the files that each rank wrote
    with its own pieces, if the format records in each file where the pieces belong. joins_ranks: whether files of
    several ranks are also joined if only their names say so.
    """

    ends: tuple[str, ...]
    usual: tuple[str, ...] = ()
    ignored: re.Pattern[str] | None = None
    rank: re.Pattern[str] | None = None
    joins_ranks: bool = False

    def is_one(self, path: Path) -> bool:
        """Whether this is the name of such a file, of an index of such files, or of a directory with one."""
        if path.is_dir():
            return bool(self._candidates(path))
        return path.name.endswith((*self.ends, *(end + INDEX_END for end in self.ends)))

    def find(self, path: Path) -> ModelFiles:
        """The files of the checkpoint at `path`: a file, an index or a directory.

        CheckpointError if several could be meant, if names are numbered and some numbers are missing, and if an index
        is malformed or names anything but files next to it.
        """
        if not path.is_dir():
            return (
                indexed_files(path)
                if path.name.endswith(INDEX_END)
                else ModelFiles(path.parent, (path.name,))
            )
        candidates = self._candidates(path)
        indexes = [name for name in candidates if name.endswith(INDEX_END)]
        files = [name for name in candidates if not name.endswith(INDEX_END)]
        usual = next((name for name in self.usual if name in candidates), None)
        if usual in files and usual + INDEX_END in indexes:
            # The index counts if it names this file; otherwise the file comes first, as in `from_pretrained`.
            listed = indexed_files(path / (usual + INDEX_END))
            return listed if listed.names == (usual,) else ModelFiles(path, (usual,))
        if usual in files:
            return ModelFiles(path, (usual,))
        if usual is not None or len(indexes) == 1:
            return indexed_files(path / (usual or indexes[0]))
        return self._without_index(path, candidates, files)

    def _without_index(self, path: Path, candidates: Sequence[str], files: list[str]) -> ModelFiles:
        if files == candidates and self.rank is not None and all(map(self.rank.match, files)):
            self._require_all(path, numbered_sets({self.rank.sub("", name): None for name in files}))
            return ModelFiles(path, tuple(files))
        sets = numbered_sets(files)
        if files == candidates and len(sets) == 1 and len(sets[0].names) == len(files):
            self._require_all(path, sets)
            several = sets[0].of_ranks and len(files) > 1
            if self.joins_ranks or not several:
                return ModelFiles(path, sets[0].names, of_ranks=several)
        elif len(candidates) == 1 and files:
            return ModelFiles(path, (files[0],))
        shown = first_of(candidates) or "none"
        if any(numbered.of_ranks and len(numbered.names) > 1 for numbered in sets):
            raise CheckpointError(
                f"{path}: expected one file of weights, found files of several ranks, {shown}: each file contains "
                "pieces of the same tensors, and Twinshard does not join the pieces; join them with the program that "
                "wrote them, or save with torch.distributed.checkpoint"
            )
        raise CheckpointError(
            f"{path}: expected one file of weights, found {shown}: "
            f"{'give the path of one of them' if candidates else 'is this the directory?'}"
        )

    def _require_all(self, path: Path, sets: Sequence[NumberedFiles]) -> None:
        for numbered in sets:
            if not numbered.complete:
                raise CheckpointError(
                    f"{path}: expected every file of the numbered series, found {first_of(numbered.names)}, but "
                    f"{numbered.problem}: fetch all files, or give the path of one file to read that file alone"
                )

    def _candidates(self, directory: Path) -> list[str]:
        ends = (*self.ends, *(end + INDEX_END for end in self.ends))
        names = sorted(child.name for child in directory.iterdir() if child.name.endswith(ends))
        return [name for name in names if self.ignored is None or self.ignored.fullmatch(name) is None]


def indexed_files(index: Path) -> ModelFiles:
    """The files that an index names. CheckpointError if it is malformed or names anything but files next to it."""
    weight_map = read_weight_map(index)
    return ModelFiles(index.parent, tuple(dict.fromkeys(weight_map.values())), weight_map, index.name)
