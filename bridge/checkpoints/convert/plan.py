"""The choices of a conversion, and the plan that is made from them before anything is written."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bridge.checkpoints.convert.found_mapping import found_mapping, why_mapping
from bridge.checkpoints.convert.template import Template, step_of_template, template_at
from bridge.checkpoints.convert.template_leaves import Fitted
from bridge.checkpoints.ground.checked import checked, manifest_home
from bridge.checkpoints.ground.outputs import Output, apply_casts, carried_kinds, parse_casts, require_dtypes
from bridge.checkpoints.ground.selection import SelectedReader, Selection, readable_values, require_no_tensors
from bridge.core.formats import Format, format_named, open_checkpoint
from bridge.core.formats.files.certificate import Certificate
from bridge.core.formats.files.manifest import manifest_path
from bridge.core.formats.orbax.item import StepMetadata
from bridge.core.formats.reading.regular_files import digest_of
from bridge.core.formats.stores.store import place_of
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TreePath, name_of
from bridge.core.formats.tensors.leaves import LEAVES
from bridge.core.formats.tensors.wrapping import home_of
from bridge.core.formats.whole.adapters import MergedReader
from bridge.core.formats.whole.companions import (
    ADAPTER,
    ADAPTER_CONFIG,
    Companions,
    companions_home,
    left_alone,
)
from bridge.core.formats.whole.quantized import DequantizedReader
from bridge.core.long_calls import collection_paused
from bridge.core.mapping.language.relation import whole_source
from bridge.core.mapping.language.rules import MappingLike, mapping_table
from bridge.core.mapping.language.table import MappingTable, Tied
from bridge.core.mapping.one_rule.sizes import with_config, with_stored_sizes
from bridge.core.mapping.plan.plan import carried_over
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.numbered_states import with_named_states
from bridge.core.mapping.states.plain_states import with_plain_states
from bridge.core.version import __version__


@dataclass(frozen=True)
class ConvertOptions:
    """The choices of a conversion.

    to: "dcp", "orbax" or "safetensors"; default: DCP for an Orbax checkpoint, else Orbax (`convert` first considers the
    destination's name). mapping: a shipped family's name, a TOML file or a table; without one, tree paths are kept, or,
    if a convention or a template needs a mapping, `found_mapping` chooses. into, from_: conventions of the mapping, if
    names and format do not determine them. axes: sizes for the mapping's axes, which override its table. selection:
    which part of the source. casts: dtypes by patterns of names in the destination. tied: whether a weight with two
    names is stored "once" or under "both"; default: as in the source. verify: compare the source with its manifest and
    its format's checksums, as far as it is read. any_model: use the mapping for any model that the source's
    `config.json` names. companions: also copy `config.json`, tokenizer files and the like. dequantize: decode MXFP4
    weights and float8 weights with scales of blocks to bfloat16, see `formats/whole/quantized.py`. merge_adapter: a
    folder with peft's LoRA or DoRA adapter of the source's model, which is merged into the weights, see
    `formats/whole/adapters.py`. items: of an Orbax source, see `open_checkpoint`. write_items: keys of the tree that
    each become an item of an Orbax destination; default: the items of a template that is a step. optimizer_order: the
    meaning of torch's numbers in optimizer states: "model", or a file with one weight's name on each line, see
    `numbered_states.py`. like: a checkpoint that the destination's program saved, or its JAX tree in memory; the
    destination gets exactly this tree, see `template.py`. salvage: leave out what is damaged, see `salvage.py`.
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
    merge_adapter: str | os.PathLike[str] | None = None
    items: Sequence[str] = ()
    write_items: Sequence[str] = ()
    optimizer_order: str | None = None
    like: object = None
    salvage: bool = False

    def __post_init__(self) -> None:
        if self.to is not None:
            format_named(self.to)
        if self.write_items and self.to not in (None, "orbax"):
            raise ValueError(f"expected format orbax, which has items, for write_items, got {self.to!r}")

    @cached_property
    def step_like(self) -> StepMetadata | None:
        """The template's step with named items, if the destination is to be such a step."""
        if self.write_items or self.like is None or self.to not in (None, "orbax"):
            return None
        return step_of_template(self.like)

    @property
    def items_to_write(self) -> Sequence[str]:
        """The named items of the destination, from the template if they are not chosen."""
        return self.write_items if self.step_like is None else tuple(self.step_like.handlers)

    @property
    def finds_a_mapping(self) -> bool:
        """Whether a shipped mapping is found for the source, if names or conventions need one."""
        return self.mapping is None and not (self.into is None and self.from_ is None and self.like is None)

    @property
    def concern_a_mapping(self) -> bool:
        """Whether there is a mapping, or a choice that is refused without one."""
        return bool(
            self.mapping is not None or self.into is not None or self.from_ is not None or self.axes
        ) or (self.tied is not None or self.any_model)


@dataclass(frozen=True)
class Conversion:
    """A planned conversion: the contents of the destination.

    outputs: tensors by their name in the destination. objects: (tree path, value) by name in the destination. kinds: of
    tensors and objects by name in the destination, see `tensors/leaves.py`, without implied ones. files: the source's
    files, empty if they are in a store. digest: of these files, by name, size and time. left_out: names in the source
    that are not copied, dropped or not selected. inexact: names of tensors that a mapping or a cast rounds.
    companions, left_alone: see `bridge.core.formats.whole.companions`. conventions, remarks: see `plan.plan`. filled:
    by name in the destination, the content of leaves that only the template has, see `template.py`. also_read: files
    and digest, as of the source, of the "template" and the "adapter". mapping, sides: see `Fitted`.
    """

    source: Path | str
    source_format: str
    files: tuple[Path, ...]
    digest: str
    format: Format
    outputs: Mapping[str, Output]
    objects: Mapping[str, tuple[TreePath, object]]
    kinds: Mapping[str, str]
    left_out: tuple[str, ...]
    inexact: tuple[str, ...]
    companions: Companions = field(default_factory=Companions)
    conventions: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    also_read: Mapping[str, tuple[tuple[Path, ...], str]] = field(default_factory=dict)
    mapping: MappingTable | None = None
    sides: tuple[str, str] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements, as written."""
        return sum(output.nbytes for output in self.outputs.values())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the plan: plans with equal digests write the same, given the same source."""
        lines = []
        for output in self.outputs.values():
            planned, content = output.planned, output.planned.content
            # For an unchanged tensor, making the whole text would take longer than copying small elements.
            source = whole_source(content)
            text = (
                f"all of {source} {content.shape} {name_of(content.dtype)}"
                if source is not None
                else repr(content)
            )
            lines.append(f"{planned.name} {planned.path} {name_of(output.dtype)} {text}\n")
        lines += [f"{name} {path} {value!r}\n" for name, (path, value) in self.objects.items()]
        lines.append(f"{sorted(self.kinds.items())}")
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@contextmanager
def _opened(
    source: str | os.PathLike[str], options: ConvertOptions
) -> Iterator[tuple[CheckpointReader, CheckpointReader, Mapping[str, str]]]:
    """The source, what is read of it, and the faults that are left out."""
    if options.salvage:
        from bridge.checkpoints.convert.salvage import salvaged

        with salvaged(source, options.items) as salvage:
            yield salvage
    else:
        with open_checkpoint(source, verify=options.verify, items=options.items) as reader:
            yield reader, checked(reader) if options.verify else reader, {}


@contextmanager
def planned(
    source: str | os.PathLike[str], options: ConvertOptions
) -> Iterator[tuple[Conversion, CheckpointReader]]:
    """Plan a conversion, with the source open meanwhile. Nothing is written.

    Raises the errors of `convert` about source, mapping, selection and casts.
    """
    table, casts = _table_of(options, options.mapping), parse_casts(options.casts)
    with (
        ExitStack() as planning,
        _opened(source, options) as (whole, held, faults),
        template_at(options.like) if options.like is not None else nullcontext() as template,
        adapter_of(options) as adapter,
    ):
        planning.enter_context(collection_paused())
        held = changed = altered(held, adapter, options)
        usual: Format = "dcp" if held.format == "orbax" else "orbax"
        target = options.to or (usual if template is None else template.format)
        table, found = (table, ()) if table is not None else _found(whole, held, template, target, options)
        fitted, held, left_out = _chosen(whole, held, template, target, table, options)
        files, digest = _files_of(whole)
        helpers = {"template": None if template is None else template.reader, "adapter": adapter}
        plan, reader, casts = fitted.plan, fitted.reader, {**fitted.casts, **casts}
        held = held if template is None else reader
        outputs = apply_casts(plan.tensors.values(), casts)
        require_dtypes(whole, outputs.values(), target)
        kept = {name: entry for name, entry in plan.objects.items() if entry[0] != LEAVES}
        values = readable_values(reader, [old for _, old in kept.values()])
        objects = {name: (path, values[old]) for name, (path, old) in kept.items()} | dict(plan.notes)
        origins = {name: old for name, (_, old) in kept.items()}
        kinds = carried_kinds(held, outputs.values(), objects, origins)
        merged = () if adapter is None else [file.name for file in adapter.files()]
        unread = {name: why for name, why in left_alone(whole).items() if name not in merged}
        conversion = Conversion(
            place_of(source),
            reader.format,
            files,
            digest,
            target,
            outputs,
            objects,
            kinds,
            (*left_out, *plan.dropped),
            tuple(name for name, output in outputs.items() if output.rounds or name in plan.inexact),
            _companions(whole, unread, options),
            conventions=plan.conventions,
            remarks=(*found, *plan.remarks, *(changed.remarks if isinstance(changed, MergedReader) else ())),
            left_alone=unread,
            filled=fitted.filled,
            faults=faults,
            also_read={
                name: _files_of(helper, name) for name, helper in helpers.items() if helper is not None
            },
            mapping=fitted.mapping,
            sides=fitted.sides,
        )
        planning.close()
        yield conversion, reader


def adapter_of(options: ConvertOptions) -> AbstractContextManager[CheckpointReader | None]:
    """The opened adapter that is merged into the source, if there is one."""
    if options.merge_adapter is None:
        return nullcontext()
    return open_checkpoint(options.merge_adapter, verify=options.verify)


def altered(
    source: CheckpointReader, adapter: CheckpointReader | None, options: ConvertOptions
) -> CheckpointReader:
    """The source with its weights decoded and merged with the adapter, as the options say."""
    if options.dequantize:
        source = DequantizedReader(source)
    return source if adapter is None else MergedReader(source, adapter)


def _table_of(options: ConvertOptions, mapping: MappingLike | None) -> MappingTable | None:
    if mapping is None and (options.finds_a_mapping or not options.concern_a_mapping):
        return None
    return mapping_table(mapping, options.axes, options.tied, any_model=options.any_model)


def _found(
    whole: CheckpointReader,
    held: CheckpointReader,
    template: Template | None,
    target: Format,
    options: ConvertOptions,
) -> tuple[MappingTable | None, tuple[str, ...]]:
    """The mapping of a conversion that names none, with a remark; no mapping if names need none."""
    conventions = [name for name in (options.into, options.from_) if name is not None]
    there = None if template is None else template.reader
    if options.finds_a_mapping and (why := why_mapping(held, there, conventions)):
        table, remark = found_mapping(
            held,
            lambda t: _chosen(whole, held, template, target, _table_of(options, t), options),
            conventions,
            why,
        )
        return _table_of(options, table), (remark,)
    if options.concern_a_mapping:
        # Refuses choices that nothing would use.
        mapping_table(None, options.axes, options.tied, any_model=options.any_model)
    return None, ()


def _chosen(
    whole: CheckpointReader,
    held: CheckpointReader,
    template: Template | None,
    target: Format,
    table: MappingTable | None,
    options: ConvertOptions,
) -> tuple[Fitted, CheckpointReader, Sequence[str]]:
    """The translation of the selected part, the reader before the selection, and the names that are left out."""
    left_out: Sequence[str] = ()
    if table is not None:
        table = with_config(table, whole)
        held = with_named_states(with_plain_states(held, table), table, options.optimizer_order)
    reader = held
    if options.salvage or not options.selection.everything:
        reader = selected = SelectedReader(held, options.selection)
        left_out = selected.left_out
        if table is not None:
            # A part of a model may lack tensors that rules require, or that determine sizes.
            table = with_stored_sizes(table, held).part()
    if template is not None or table is not None:
        require_no_tensors(reader, reader.object_paths)
    if template is not None:
        order = options.optimizer_order
        fitted = template.fitted(reader, table, options.from_, options.into, target, order)
    elif table is not None:
        plan = make_plan(reader, target, table, into=options.into, from_=options.from_)
        fitted = Fitted(plan, reader, mapping=table, sides=plan.conventions)
    else:
        fitted = Fitted(carried_over(reader, target), reader)
    return fitted, held, left_out


def _files_of(reader: CheckpointReader, role: str = "source") -> tuple[tuple[Path, ...], str]:
    """The files of an opened checkpoint, none if they are in a store, and their digest."""
    if (fingerprint := getattr(reader, "fingerprint", None)) is not None:  # in a store, or in memory
        return (), fingerprint
    # What is salvaged may lack files.
    files = tuple(file for file in reader.files() if file.exists())
    if role == "adapter":
        files = (*files, files[0].parent / ADAPTER_CONFIG)
    return files, digest_of(files)


def _companions(whole: CheckpointReader, unread: Mapping[str, str], options: ConvertOptions) -> Companions:
    """The files that are copied. unread: files next to the source that are left alone, by name."""
    companions = Companions.beside(companions_home(home_of(whole))) if options.companions else Companions()
    adapter = {ADAPTER_CONFIG: "the adapter that it describes is not read"}
    without = adapter if any(name.startswith(ADAPTER) for name in unread) else {}
    return dataclasses.replace(companions, dequantized=options.dequantize).without(without)


def conversion_key(conversion: Conversion, write_items: Sequence[str] = ()) -> dict[str, str]:
    """The identity of a conversion: conversions with equal keys write the same bytes."""
    source = conversion.source
    return {
        **{name: digest for name, (_, digest) in conversion.also_read.items()},
        "source": source if isinstance(source, str) else os.path.abspath(source),
        "files": conversion.digest,
        "format": conversion.format,
        "plan": conversion.fingerprint,
        "items": ",".join(write_items),
        "twinshard": __version__,
    }


def certificate_of(conversion: Conversion, options: ConvertOptions) -> Certificate:
    """The certificate for the destination's manifest."""
    digests = {name: digest for name, (_, digest) in conversion.also_read.items()}
    digests |= {"source": conversion.digest, "plan": conversion.fingerprint}
    if isinstance(conversion.source, Path):
        manifest = manifest_path(manifest_home(conversion.source))
        if manifest.is_file():
            digests["source manifest"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    return Certificate(
        # A path may have bytes that are no text.
        str(conversion.source).encode(errors="backslashreplace").decode(),
        conversion.source_format,
        __version__,
        digests,
        "" if conversion.mapping is None else conversion.mapping.name,
        conversion.conventions or (),
        conversion.filled,
        conversion.left_out,
        conversion.inexact,
        tuple(options.casts),
        conversion.faults,
    )


def require_unchanged(conversion: Conversion) -> None:
    """CheckpointError if the source, the template or the adapter has changed since the conversion was planned."""
    for place, files, digest in (
        (conversion.source, conversion.files, conversion.digest),
        *((f"the {name}", *read) for name, read in conversion.also_read.items()),
    ):
        if files and digest_of(files) != digest:
            raise CheckpointError(
                f"{place} was changed while it was being converted: expected one checkpoint, found parts of two; "
                "convert it again when its writer has finished"
            )
