"""Read weights from a checkpoint straight to where they stay: one rank's share, format kept, through one small buffer.

Each slot of the model is allocated once, in its final in-memory form (formats.weight), and filled row by row with
positioned reads. Nothing is repacked, joined or widened on the way, so the peak is the weights plus the buffer, however
large the checkpoint. Scales are checked as they pass by.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fp4ward.checkpoint.assign import Assignment, Facts, Piece, assign
from fp4ward.checkpoint.index import Index, Located
from fp4ward.errors import UserError
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import FP8_BLOCK, NVFP4_GROUP, Component, Format, Stored
from fp4ward.formats.scheme import Notice, Scheme
from fp4ward.formats.weight import Weight, allocate
from fp4ward.parallel.placement import ONE_RANK, Layout, Slot, intervals

BUFFER = 16 << 20  # bytes a read: reads of 16 MiB reach the speed of the page cache; larger ones only cost memory
DTYPES = {
    "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F16": torch.float16,
    "F32": torch.float32,
}  # fmt: skip

Progress = Callable[[int, int, str], None]
Ranges = list[tuple[int, int]]
T = TypeVar("T")


@dataclass
class Loaded:
    """tensors: slot -> Weight (linear, experts) or f32 tensor. kv_scales: layer -> (k, v), 1.0 where none is stored.
    formats: slot -> Format. left_out: reason -> (tensors, bytes)."""

    tensors: dict[str, Weight | Tensor]
    kv_scales: dict[int, tuple[float, float]]
    formats: dict[str, Format]
    notices: list[Notice]
    left_out: dict[str, tuple[int, int]]


def load(
    index: Index,
    slots: Sequence[Slot],
    *,
    facts: Facts,
    scheme: Scheme | None = None,
    assigned: Assignment | None = None,
    device: str | torch.device = "cpu",
    rank: int = 0,
    layout: Layout = ONE_RANK,
    progress: Progress | None = None,
) -> Loaded:
    """Fill `slots` from the checkpoint, cut for `rank` of a layout. assigned: where it is known.

    progress(done, total, name) counts bytes of the files that this rank needs. UserError, before any byte is read, for
    a tensor without a place or a place without a tensor, and while reading for values that cannot be right (a NaN
    scale, a global scale of 0) or a file that ends early.
    """
    assigned = assigned or assign(index, slots, facts=facts, scheme=scheme)
    placed = [(slot, _local(slot, assigned, rank, layout)) for slot in slots if slot.name not in assigned.aliases]
    total = sum(_share(slot, cut, assigned) for slot, cut in placed)
    done = 0
    tensors: dict[str, Weight | Tensor] = {}
    with Reader(torch.device(device)) as reader:
        for slot, cut in placed:
            if slot.kind == "tensor":
                tensors[slot.name] = _load_plain(reader, assigned.plain[slot.name], cut.rows)
                done += _share(slot, cut, assigned)
            else:
                format, pieces = assigned.formats[slot.name], assigned.pieces[slot.name][slice(*cut.experts)]
                lead = (len(pieces),) if slot.kind == "experts" else ()
                shape = (*lead, _length(cut.rows), _length(cut.columns))
                weight = make_room(slot.name, format, shape, device, done, total)
                share = _share(slot, cut, assigned) // len(pieces)
                for e, piece in enumerate(pieces):
                    _load_piece(reader, piece, weight.expert(e) if lead else weight, cut, expert=bool(lead))
                    done += share
                    if progress is not None and lead:
                        progress(done, total, slot.name)
                tensors[slot.name] = weight
            if progress is not None:
                progress(done, total, slot.name)
        kv = {layer: kv_scales(reader, scales) for layer, scales in assigned.kv.items()}
    for slot in slots:
        if slot.name in assigned.aliases:
            tensors[slot.name] = _share_tied(tensors[assigned.aliases[slot.name]], slot, rank, layout)
    return Loaded(tensors, kv, assigned.formats, assigned.notices, assigned.left_out)


def make_room(
    name: str, format: Format, shape: Sequence[int], device: str | torch.device, done: int, total: int
) -> Weight:
    """An unwritten weight of layer `name`; done, total: bytes of all weights. UserError where the device is full."""
    try:
        return allocate(format, shape, device)
    except (RuntimeError, MemoryError) as fault:
        raise UserError(
            f"{device} has no room for layer {name}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB of weights are "
            f"loaded; free memory, or use a larger device"
        ) from fault


@contextlib.contextmanager
def progress_bar(what: str = "loading", count: bool = False) -> Iterator[Progress | None]:
    """A `progress` for load that draws bytes and rate (or how many) on stderr; None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    amount = (MofNCompleteColumn(),) if count else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Bar(TextColumn(what), BarColumn(), *amount, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, _name: bar.update(task, completed=done, total=total)


# ---- reading --------------------------------------------------------------------------------------------------------


class Reader:
    """Rows of stored tensors through one buffer, pinned when they go on to a GPU. Keeps files open while in use."""

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self.device = device
        self._files: dict[Path, int] = {}
        self._buffer = self._new(size)

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def chunks(self, t: Located, columns: int, first: int, last: int) -> Iterator[Tensor]:
        """Rows first:last of `t`, seen as [rows, columns] of its dtype, in order, as many at a time as the buffer
        holds. Each chunk is overwritten by the next."""
        dtype = DTYPES[t.dtype]
        row = columns * dtype.itemsize
        if row > self._buffer.numel():
            self._buffer = self._new(row)  # no model has rows of this size; one row is what a chunk must hold
        step = max(1, self._buffer.numel() // max(1, row))
        for at in range(first, last, step):
            rows = min(step, last - at)
            part = self._buffer[: rows * row]
            self._read(t, t.begin + at * row, part.numpy().data)
            yield part.view(dtype).view(rows, columns)

    def _read(self, t: Located, at: int, into: memoryview) -> None:
        try:
            if t.file not in self._files:
                self._files[t.file] = os.open(t.file, os.O_RDONLY)
            while len(into):
                n = os.preadv(self._files[t.file], [into], at)
                if n == 0:
                    raise UserError(f"{t.file}: the file ends inside tensor {t.name}; it changed while it was read")
                at, into = at + n, into[n:]
        except OSError as e:
            raise UserError(f"{t.file}: cannot be read (tensor {t.name}): {e.strerror or e}") from None

    def value(self, t: Located, at: int = 0) -> float:
        """Element `at` of a small float tensor."""
        return float(next(self.chunks(t, 1, at, at + 1)))

    def whole(self, t: Located) -> Tensor:
        """All of a tensor, in memory of its own: small scales, and data when an error is being explained."""
        out = torch.empty(t.shape, dtype=DTYPES[t.dtype])
        flat, at = out.view(-1, 1), 0
        for chunk in self.chunks(t, 1, 0, out.numel()):
            flat[at : at + len(chunk)] = chunk
            at += len(chunk)
        return out


# ---- cutting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """This rank's intervals of the rows (dimension 0 for a plain tensor) and columns of a logical weight, or of each of
    its experts."""

    rows: Ranges
    columns: Ranges
    experts: tuple[int, int] = (0, 1)


def _local(slot: Slot, assigned: Assignment, rank: int, layout: Layout) -> Cut:
    if slot.kind == "tensor":
        return Cut(intervals(slot, layout, rank)[0], [(0, 1)])
    *experts, rows, columns = intervals(slot, layout, rank, assigned.formats[slot.name].column_unit)
    return Cut(rows, columns, *(span for (span,) in experts))


def _length(intervals: Ranges) -> int:
    return sum(stop - start for start, stop in intervals)


def _share(slot: Slot, cut: Cut, assigned: Assignment) -> int:
    """Bytes of the files behind this rank's rows of a slot: what progress counts."""
    pieces = assigned.pieces.get(slot.name) or [Piece(assigned.plain[slot.name])]
    stored = pieces[0].stored
    size = sum(c.header.nbytes for c in stored.components.values())
    rows = slot.shape[0] if slot.kind == "tensor" else math.prod(stored.shape[:-1])
    return size * _length(cut.rows) // rows * _length([cut.experts])


def _share_tied(source: Weight | Tensor, slot: Slot, rank: int, layout: Layout) -> Weight:
    """An output head that is the embedding: the same memory, this rank's part of it."""
    assert isinstance(source, Weight) and source.shape == slot.shape, "the embedding is held whole by every rank"
    (rows,), (columns,) = intervals(slot, layout, rank)
    return source.rows(*rows).columns(*columns)


# ---- filling --------------------------------------------------------------------------------------------------------


def _load_plain(reader: Reader, stored: Stored, rows: Ranges) -> Tensor:
    """f32 tensor from a float tensor or FP8 with its scale, cut along dimension 0."""
    data = _at(stored.components["data"])
    out = torch.empty((_length(rows), *stored.shape[1:]), dtype=torch.float32, device=reader.device)
    width = math.prod(stored.shape[1:])
    check = _checked(fp8.check_data, reader, data) if stored.format.quantized else None
    _copy(reader, data, width, out.view(-1, width), 0, Cut(rows, [(0, width)]), check)
    if stored.format.quantized:
        *lead, n, k = stored.shape
        scale = _at(stored.components["scale"])
        fp8.check_scale(scale.name, reader.whole(scale), reader.whole(data))
        wide = fp8.expand_scale(reader.whole(scale), n, k, tuple(lead))
        out *= torch.cat([wide[start:stop] for start, stop in rows]).to(reader.device)
    return out


def _load_piece(reader: Reader, piece: Piece, out: Weight, cut: Cut, *, expert: bool) -> None:
    """One matrix [N, K] into its place `out` (this rank's rows and columns)."""
    stored, parts = piece.stored, out.parts
    rows, columns = stored.shape[-2:]
    base = piece.lead * rows + piece.first_row
    if stored.format.name == "nvfp4":
        _load_nvfp4(reader, piece, out, cut, base, expert=expert)
        return
    data = _at(stored.components["data"])
    if not stored.format.quantized:
        _copy(reader, data, columns, parts["data"], base, cut)
        return
    _copy(reader, data, columns, parts["data"], base, cut, _checked(fp8.check_data, reader, data))
    scale = _at(stored.components["scale"])
    if stored.format.name == "fp8_tensor":
        parts["scale"].fill_(reader.value(scale, piece.lead if math.prod(scale.shape) > 1 else 0))
    elif stored.format.name == "fp8_channel":
        _copy(reader, scale, 1, parts["scale"], base, Cut(cut.rows, [(0, 1)]))
    else:
        _expand_blocks(reader, scale, parts["scale"], piece, cut)
    _check_fp8_scale(reader, stored, out)


def _load_nvfp4(reader: Reader, piece: Piece, out: Weight, cut: Cut, base: int, *, expert: bool) -> None:
    stored, columns = piece.stored, piece.stored.shape[-1]
    packed, block = _at(stored.components["packed"]), _at(stored.components["block_scale"])
    global_ = stored.components["global_scale"]
    check = _checked(nvfp4.check_block_scale, reader, block)
    halves = [(start // 2, stop // 2) for start, stop in cut.columns]
    groups = [(start // NVFP4_GROUP, stop // NVFP4_GROUP) for start, stop in cut.columns]
    _copy(reader, packed, columns // 2, out.parts["packed"], base, Cut(cut.rows, halves))
    _copy(reader, block, columns // NVFP4_GROUP, out.parts["block_scale"], base, Cut(cut.rows, groups), check)
    source, value = _at(global_), global_value(reader, global_, piece.lead)
    zero = False
    if expert and not (math.isfinite(value) and value > 0):  # on every rank alike: look at all rows of this expert
        rows = stored.shape[-2] * piece.lead, stored.shape[-2] * (piece.lead + 1)
        zero = all(check(chunk) for chunk in reader.chunks(block, columns // NVFP4_GROUP, *rows))
    value = nvfp4.check_global(source.name, value, all_zero_blocks=zero, expert=expert)
    out.parts["global_scale"].fill_(value)


def global_value(reader: Reader, component: Component, lead: int) -> float:
    """The multiplier that a stored global scale, or entry `lead` of several, means."""
    source = _at(component)
    value = reader.value(source, lead if math.prod(source.shape) > 1 else 0)
    if component.reciprocal:
        # Dividing in f64 and rounding once more is the correctly rounded f32 quotient.
        value = float(torch.tensor(1 / value if value else math.inf, dtype=torch.float32))
    return value


def _copy(
    reader: Reader,
    source: Located,
    width: int,
    out: Tensor,
    base: int,
    cut: Cut,
    check: Callable[[Tensor], object] | None = None,
) -> None:
    """Rows and columns `cut` of `source`, seen as [rows, width], whose row `base` is row 0 of the weight, into
    out [rows, columns]. check sees whole rows as stored."""
    at = 0
    for start, stop in cut.rows:
        for chunk in reader.chunks(source, width, base + start, base + stop):
            if check is not None:
                check(chunk)
            to, column = out[at : at + len(chunk)], 0
            for first, last in cut.columns:
                to[:, column : column + last - first].copy_(chunk[:, first:last])
                column += last - first
            at += len(chunk)


def _expand_blocks(reader: Reader, scale: Located, out: Tensor, piece: Piece, cut: Cut) -> None:
    """128x128 block scales, 2-D or ModelOpt's 4-D, to one row of scales a weight row."""
    rows, columns = piece.stored.shape[-2:]
    high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    at = 0
    for start, stop in cut.rows:
        start, stop = start + piece.first_row, stop + piece.first_row
        block = start // FP8_BLOCK
        for chunk in reader.chunks(scale, wide, piece.lead * high + block, piece.lead * high + -(-stop // FP8_BLOCK)):
            for line in chunk:
                n = min(stop, (block + 1) * FP8_BLOCK) - max(start, block * FP8_BLOCK)
                column = 0
                for first, last in cut.columns:
                    first, last = first // FP8_BLOCK, -(-last // FP8_BLOCK)
                    out[at : at + n, column : column + last - first] = line[first:last].to(out)
                    column += last - first
                at, block = at + n, block + 1


def _checked(check: Callable[[str, Tensor], T], reader: Reader, source: Located) -> Callable[[Tensor], T]:
    """`check` for parts of a tensor; a fault is looked for again in the whole, so that its index is the file's."""

    def run(part: Tensor) -> T:
        try:
            return check(source.name, part)
        except UserError:
            check(source.name, reader.whole(source))
            raise

    return run


def _check_fp8_scale(reader: Reader, stored: Stored, out: Weight) -> None:
    """Scales finite and positive, or zero over zeros. Looks at the data only where a scale is zero."""
    scale, data = out.parts["scale"], out.parts["data"]
    suspect = ~((scale > 0) & (scale < math.inf)).all(-1)
    source, codes = _at(stored.components["scale"]), _at(stored.components["data"])
    for row in suspect.nonzero().flatten().tolist():
        try:
            fp8.check_scale(source.name, scale[row : row + 1], data[row : row + 1])
        except UserError:
            fp8.check_scale(source.name, reader.whole(source), reader.whole(codes))  # the same fault, as in the file
            raise


def kv_scales(reader: Reader, scales: dict[str, Located]) -> tuple[float, float]:
    """(k, v) of one layer; 1.0 for what is not stored."""
    found = {"k_scale": 1.0, "v_scale": 1.0}
    for leaf, source in scales.items():
        found[leaf] = reader.value(source)
        if not (math.isfinite(found[leaf]) and found[leaf] > 0):
            text = f"tensor {source.name}: a KV-cache scale of {found[leaf]}; it must be finite and positive"
            raise UserError(text, "kv-scale")
    return found["k_scale"], found["v_scale"]


def _at(component: Component) -> Located:
    assert isinstance(component.header, Located), "headers come from an index"
    return component.header
