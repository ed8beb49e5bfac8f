"""The numbers of `fp4ward lint`: scales and codes of every quantized weight, those that loading leaves out too.

All pass through one small buffer in the order of the files, so memory stays the same however large a checkpoint is.
"""

from __future__ import annotations

import math

import torch

from fp4ward.checkpoint.assign import Assignment, caught
from fp4ward.checkpoint.index import Located
from fp4ward.checkpoint.lint import Fused, Kind, Progress, Report, groups
from fp4ward.checkpoint.load import Reader, global_value, kv_scales
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import NVFP4_GROUP, Stored
from fp4ward.formats.scheme import NUMBER

BUFFER = 1 << 20
NAN = (0x7F, 0xFF)  # of e4m3
BAD_BLOCK_SCALES = (0x7F, *range(0x81, 0x100))  # NaN, and what is negative: 0x80 is zero
E4M3: list[float] = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
ZERO_CODES = [(b & 0x07 == 0) + (b & 0x70 == 0) for b in range(256)]  # of the two FP4 codes in a byte


def read(assigned: Assignment, report: Report, progress: Progress | None) -> None:
    """Findings and statistics of all scales and codes into `report`."""
    every = [p.stored for pieces in assigned.pieces.values() for p in pieces]
    every += [*assigned.plain.values(), *assigned.passed_over.values()]
    stored = {id(s): s for s in every if s.format.quantized}  # a stack is the piece of many experts
    in_order = sorted(stored.values(), key=lambda s: [(t.file, t.begin) for t in _parts(s)])
    with Reader(torch.device("cpu"), BUFFER) as reader:
        scan = _Scan(reader, report, sum(t.nbytes for s in in_order for t in _parts(s)), progress)
        for s in in_order:
            with caught(s.module, report.fault):  # a file that ends early, or cannot be read
                (scan.nvfp4 if s.format.name == "nvfp4" else scan.fp8)(s)
        for scales in assigned.kv.values():
            for leaf, source in scales.items():
                with caught(source.name, report.fault):
                    kv_scales(reader, {leaf: source})
    scan.compare_fused()


def _parts(stored: Stored) -> list[Located]:
    """Where the components are, in the order of Format.components."""
    headers = [stored.components[c].header for c in stored.format.components]
    return [h for h in headers if isinstance(h, Located)]


class _Scan:
    def __init__(self, reader: Reader, report: Report, total: int, progress: Progress | None) -> None:
        self.reader, self.report, self.total, self.progress = reader, report, total, progress
        self.done = 0
        self.one_scale: dict[str, float] = {}  # module -> the scale of all of its weight

    def nvfp4(self, stored: Stored) -> None:
        packed, block, scale = _parts(stored)
        *lead, n, k = stored.shape
        kind, expert = self._kind(stored), ".experts." in stored.module
        every, first = torch.zeros(256, dtype=torch.int64), None
        for e in range(math.prod(lead)):  # of a stack an expert at a time
            module, rows = f"{stored.module}.{e}" if lead else stored.module, range(e * n, (e + 1) * n)
            scales, at = self._bytes(block, k // NVFP4_GROUP, rows, BAD_BLOCK_SCALES)
            every, first = every + scales, at if first is None else first
            codes, _ = self._bytes(packed, k // 2, rows, ())
            zeros = sum(c * z for c, z in zip(codes.tolist(), ZERO_CODES, strict=True))
            no_scales = int(scales[0] + scales[0x80]) == n * k // NVFP4_GROUP
            self._zeros(kind, module, n * k, n * k if no_scales else zeros, expert)
            value = global_value(self.reader, stored.components["global_scale"], e)
            with caught(scale.name, self.report.fault):
                value = nvfp4.check_global(scale.name, value, all_zero_blocks=no_scales, expert=expert)
                kind.scales = _range([*kind.scales, value])
                if not lead:
                    self.one_scale[module] = value
        found = [E4M3[b] for b in every[: len(E4M3)].nonzero().flatten().tolist()]
        kind.block_scales = _range([*kind.block_scales, *found])
        self._bad_bytes("block-scale", block, first, every, BAD_BLOCK_SCALES)
        self._advance(scale.nbytes, scale.name)

    def fp8(self, stored: Stored) -> None:
        data, source = _parts(stored)
        *lead, n, k = stored.shape
        kind, rows = self._kind(stored), math.prod(lead) * n
        codes, first = self._bytes(data, k, range(rows), NAN)
        self._bad_bytes("fp8-code", data, first, codes, NAN)
        self._zeros(kind, stored.module, rows * k, int(codes[0] + codes[0x80]), ".experts." in stored.module)
        scale = self.reader.whole(source).float()
        self._advance(source.nbytes, source.name)
        with caught(source.name, self.report.fault):
            if fp8.check_finite(source.name, scale):
                wide, at = fp8.expand_scale(scale, n, k, tuple(lead)).flatten(0, -2), 0
                for chunk in self.reader.chunks(data, k, 0, rows):
                    erased = fp8.erased_by(wide[at : at + len(chunk)], chunk)
                    if bool(erased.any()):
                        raise fp8.erases(source.name, _position(at * k + _first(erased), data.shape))
                    at += len(chunk)
            kind.scales = _range([*kind.scales, float(scale.min()), float(scale.max())])
            if scale.numel() == 1:
                self.one_scale[stored.module] = float(scale)

    def compare_fused(self) -> None:
        for whole, parts in groups(self.one_scale):
            values = [self.one_scale[p] for p in parts]
            fused = self.report.fused.setdefault(NUMBER.sub("*", whole), Fused())
            fused.groups += 1
            fused.differ += len(set(values)) > 1
            ratio = max(values) / min(values) if min(values) else 1.0  # 0: an expert that is zero
            if ratio > fused.ratio:
                fused.ratio, fused.where = ratio, whole
        for name, f in self.report.fused.items():
            if f.differ:
                text = f"scales differ in {f.differ} of {f.groups} groups, at most {f.ratio:.2f} to 1"
                where = f" ({f.where})" if f.where else ""
                self.report.add("info", "fused-scales", name, f"{text}{where}; each row runs with its own, exactly")

    def _bytes(self, t: Located, row: int, rows: range, bad: tuple[int, ...]) -> tuple[torch.Tensor, int | None]:
        """How often each byte occurs in `rows`, `row` bytes each, and where in the tensor the first of `bad` is."""
        counts, first, at = torch.zeros(256, dtype=torch.int64), None, rows.start * row
        for chunk in self.reader.chunks(t, row, rows.start, rows.stop):
            byte = chunk.view(torch.uint8).flatten()
            here = torch.bincount(byte, minlength=256)
            if first is None and bool(here[list(bad)].any()):
                first = at + _first(torch.isin(byte, torch.tensor(bad, dtype=torch.uint8)))
            counts, at = counts + here, at + len(byte)
            self._advance(len(byte), t.name)
        return counts, first

    def _bad_bytes(self, code: str, t: Located, at: int | None, counts: torch.Tensor, bad: tuple[int, ...]) -> None:
        if at is not None:
            what = "NaN" if int(counts[list(NAN)].sum()) else "negative"
            n = int(counts[list(bad)].sum())
            text = f"tensor {t.name}: {n} value{'s are' if n > 1 else ' is'} {what}, the first at"
            text += f" {_position(at, t.shape)}; the file is damaged: fetch or export it again"
            self.report.add("error", code, t.name, text)

    def _zeros(self, kind: Kind, module: str, codes: int, zeros: int, expert: bool) -> None:
        kind.weights, kind.codes, kind.zeros = kind.weights + 1, kind.codes + codes, kind.zeros + zeros
        kind.most_zeros = max(kind.most_zeros, zeros / max(codes, 1))
        if zeros == codes and expert:
            self.report.add("info", "zero-expert", module, "the whole weight is 0, as of an expert that was never used")
        elif zeros == codes:
            self.report.add("warning", "zero-weight", module, "the whole weight is 0, so this layer gives only zeros")

    def _kind(self, stored: Stored) -> Kind:
        return self.report.kinds.setdefault(NUMBER.sub("*", stored.module), Kind(stored.format.name))

    def _advance(self, size: int, name: str) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def _range(values: list[float]) -> list[float]:
    positive = [float(v) for v in values if v > 0]
    return [min(positive), max(positive)] if positive else []


def _first(mask: torch.Tensor) -> int:
    return int(mask.flatten().to(torch.uint8).argmax())


def _position(flat: int, shape: tuple[int, ...]) -> list[int]:
    out: list[int] = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        out.insert(0, i)
    return out
