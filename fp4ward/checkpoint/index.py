"""What a checkpoint folder holds, from its JSON and the headers of its safetensors files: no tensor is read, no torch.

Which files count. With model.safetensors.index.json: every file it names, plus `model*`, `mtp*` and `extra*`
safetensors beside them (drafts and late additions that an index often forgets), each reported; such a file that only
repeats tensors is ignored, and said. Without an index: the same three patterns, where numbered shards must be complete
("-of-00026"). Any other *.safetensors (consolidated copies, test references) is ignored, and said.

A header is read into memory only after its length was checked against the file, at most 100 MB (safetensors' own
limit); sizes that a header claims are compared, never allocated. Rules for a file are those of the safetensors library:
tensors in offset order leave no gap, do not overlap, and end with the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from fp4ward.errors import UserError, one_line, shown, stop
from fp4ward.formats.formats import DTYPE_BYTES, Header
from fp4ward.formats.scheme import Notice

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON = 100_000_000  # safetensors' limit for a header; generous for every other JSON file
MAX_NAME = 1024
MAX_DIMENSIONS = 8
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
LFS_POINTER = b"version https://git-lfs"
MAIN = re.compile(r"model(?![a-z0-9]).*\.safetensors")
EXTRA = re.compile(r"(mtp|extra)(?![a-z0-9]).*\.safetensors")
NUMBERED = re.compile(r"(?P<stem>.*)-(?P<i>\d+)-of-(?P<n>\d+)\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")

OnFault = Callable[[str, UserError], None]  # (file, tensor or layer, what is wrong with it)


@dataclass(unsafe_hash=True, slots=True)
class Located(Header):
    """A tensor and its bytes: [begin, end) counted from the start of `file`."""

    file: Path
    begin: int
    end: int


@dataclass(frozen=True)
class Index:
    """A checkpoint folder as its headers describe it. tensors: raw name -> where it is."""

    folder: Path
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    generation_config: dict[str, Any]
    tensors: dict[str, Located]
    notices: tuple[Notice, ...] = ()


def open_index(folder: Path | str, on_fault: OnFault = stop) -> Index:
    """Read the JSON files and every header of `folder`. UserError names the file and the tensor at fault.

    on_fault: is given faults of single files and tensors; where it returns, the rest is read without them.
    """
    folder = Path(folder)
    files = select_files(folder, on_fault)
    notices, mapping = list(files.notices), files.weight_map
    config = _config(folder / "config.json")
    tensors: dict[str, Located] = {}
    lost: set[str] = set()  # files that cannot be read

    def header(name: str) -> dict[str, Located]:
        try:
            return read_header(folder / name)
        except UserError as e:
            lost.add(name)
            on_fault(name, UserError(str(e), e.code or "unreadable-file"))
            return {}

    for name in files.named:
        _merge(tensors, header(name), on_fault)
    for name in files.extra:
        found = header(name)
        if name in lost:
            continue
        if mapping is not None and found.keys() <= tensors.keys():
            notices.append(Notice("duplicate-file", name, "not read: the files of the index hold all of its tensors"))
            continue
        _merge(tensors, found, on_fault)
        notices.append(Notice("extra-shard", name, f"read too: {len(found)} tensors beside the main weights"))
    if mapping is not None:
        _compare({t: f for t, f in mapping.items() if f not in lost}, tensors, notices, on_fault)
    if not tensors:
        on_fault(str(folder), UserError(f"{folder}: the safetensors files hold no tensors", "missing"))
    return Index(
        folder,
        config,
        _config(folder / "hf_quant_config.json") if "hf_quant_config.json" in files.json else None,
        _config(folder / "generation_config.json") if "generation_config.json" in files.json else {},
        tensors,
        tuple(notices),
    )


def sees_tensors(folder: Path) -> bool:
    """False for a folder of JSON alone, for `open_documents`; whatever else is there is for `open_index` to judge."""
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file()


def open_documents(folder: Path | str) -> Index:
    """The JSON files of a folder without weights: an Index that has no tensors. UserError without a config.json."""
    folder = Path(folder)
    quantization = folder / "hf_quant_config.json"
    notice = Notice("tensors-not-seen", "*.safetensors", "none here: formats are what the JSON claims, unchecked")
    quant = _config(quantization) if quantization.is_file() else None
    return Index(folder, _config(folder / "config.json"), quant, {}, {}, (notice,))


def modules(index: Index, canonical: Callable[[str], str], on_fault: OnFault = stop) -> dict[str, dict[str, Located]]:
    """Tensors by canonical module and leaf (the last dotted part). UserError when two raw names become one."""
    out: dict[str, dict[str, Located]] = {}
    last, leaves = None, {}
    for name, tensor in index.tensors.items():
        raw, _, leaf = name.rpartition(".")
        if raw != last:  # tensors of one module mostly lie together
            last, leaves = raw, out.setdefault(canonical(name).rpartition(".")[0], {})
        if leaf in leaves:
            text = f"tensors {leaves[leaf].name} and {name} are two names for one weight; remove one of them"
            on_fault(name, UserError(text, "duplicate"))
            continue
        leaves[leaf] = tensor
    return out


# ---- which files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """Names in a folder that make the checkpoint. weight_map: tensor -> file by the index, None without one."""

    named: tuple[str, ...]
    extra: tuple[str, ...]
    json: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    notices: tuple[Notice, ...]


def select_files(folder: Path, on_fault: OnFault = stop) -> Files:
    """Which files of `folder` are the checkpoint, by name alone. UserError when one is missing."""
    if folder.is_file():
        raise UserError(f"{folder}: this is a file; give the folder that holds config.json and the safetensors files")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no such folder") from None
    except OSError as e:
        raise UserError(f"{folder}: cannot be listed: {e.strerror or e}") from None
    found = [n for n in names if n.endswith(".safetensors")]
    mapping = _weight_map(folder / INDEX_NAME) if INDEX_NAME in names else None
    if mapping is not None:
        named = sorted(set(mapping.values()))
        missing = [n for n in named if not os.path.exists(folder / n)]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            text = f"{folder}: {one_line(missing[0])}{more} is named by {INDEX_NAME} but missing; download it again"
            on_fault(missing[0], UserError(text, "missing-file"))
            named = [n for n in named if n not in missing]
            mapping = {t: f for t, f in mapping.items() if f not in missing}
        extra = [n for n in found if n not in named and (MAIN.fullmatch(n) or EXTRA.fullmatch(n))]
    else:
        named = [n for n in found if MAIN.fullmatch(n)]
        extra = [n for n in found if EXTRA.fullmatch(n)]
        if not named:
            pickles = [n for n in names if n.endswith(PICKLES)]
            if pickles and not found:
                raise UserError(f"{folder}: holds {pickles[0]} but fp4ward reads safetensors only; convert it first")
            other = f" (only {found[0]})" if found else ""
            raise UserError(f"{folder}: no model.safetensors and no model-00001-of-... shards are here{other}")
        _complete(folder, named, on_fault)
    if "config.json" not in names:
        raise UserError(f"{folder}: config.json is missing, so the architecture is unknown; is the download complete?")
    text = "not read: its name is not one of a checkpoint's weights (model*, mtp*, extra*, or what an index names)"
    ignored = [Notice("ignored-file", n, text) for n in found if n not in named and n not in extra]
    documents = [n for n in names if n.endswith(".json")]
    return Files(tuple(named), tuple(extra), tuple(documents), mapping, tuple(ignored))


def _complete(folder: Path, names: Iterable[str], on_fault: OnFault) -> None:
    """Numbered shards are all there and of one set."""
    sets: dict[str, dict[str, set[int]]] = {}
    for name in names:
        m = NUMBERED.fullmatch(name)
        if m:
            sets.setdefault(m["stem"], {}).setdefault(m["n"], set()).add(int(m["i"]))
    for stem, by_count in sets.items():
        if len(by_count) > 1:
            a, b = sorted(by_count)[:2]
            text = f"{folder}: shards of two sets ({stem}-...-of-{a} and -of-{b}) are here; remove one set"
            on_fault(f"{stem}-...-of-{a}", UserError(text, "duplicate"))
        for n, have in by_count.items():
            lacking = next((i for i in range(1, int(n) + 1) if i not in have), None)
            if lacking is not None:
                file = f"{stem}-{lacking:0{len(n)}d}-of-{n}.safetensors"
                on_fault(file, UserError(f"{folder}: shard {file} is missing; download it again", "missing-file"))


def _weight_map(path: Path) -> dict[str, str]:
    document = _object(parse_json(_read(path), str(path), strict=True), path.name)
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise UserError(f"{path}: 'weight_map' is missing or empty; remove the file to read the shards without it")
    for tensor, file in mapping.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise UserError(f"{path}: tensor {shown(tensor)} is in {shown(file)}; only safetensors files are read")
    for file in set(mapping.values()):
        if not file.isprintable() or re.search(r"[/\\:]", file) or file.startswith("."):
            raise UserError(f"{path}: the shard name {shown(file)} leads out of the folder; a plain name is expected")
    return mapping


def _compare(
    mapping: Mapping[str, str], tensors: Mapping[str, Located], notices: list[Notice], on_fault: OnFault
) -> None:
    """The index against what the shards really hold: the shards decide, but a promised tensor must be there."""
    held = {name: t.file.name for name, t in tensors.items()}
    for name, file in mapping.items():
        if name not in held:
            text = f"{file}: tensor {shown(name)} is missing, though {INDEX_NAME} says it is there"
            on_fault(name, UserError(text, "missing"))
        elif held[name] != file:
            text = f"tensor {name} is in {held[name]}, though {INDEX_NAME} says {file}; one of the two is stale"
            on_fault(name, UserError(text, "index-stale"))
    files = set(mapping.values())
    unnamed = [name for name, file in held.items() if name not in mapping and file in files]
    if unnamed:
        text = f"{len(unnamed)} tensors are in the shards but not in the index, {unnamed[0]} first; they are read"
        notices.append(Notice("unindexed-tensors", INDEX_NAME, text))


def _merge(tensors: dict[str, Located], found: Mapping[str, Located], on_fault: OnFault) -> None:
    """The first file that holds a tensor counts."""
    for name in sorted(tensors.keys() & found.keys()):
        a, b = tensors[name].file.name, found[name].file.name
        text = f"tensor {name} is in both {a} and {b}; remove the file that does not belong here"
        on_fault(name, UserError(text, "duplicate"))
    tensors.update({name: t for name, t in found.items() if name not in tensors})


# ---- one file -------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, Located]:
    """Tensors of one safetensors file, each checked against the file's size. UserError names file and tensor."""
    _regular(path)
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            first = f.read(max(8, len(LFS_POINTER)))
            if first.startswith(LFS_POINTER):
                raise UserError(f"{path}: a Git LFS pointer, not the weights; run 'git lfs pull' or download the file")
            if size < 8 or len(first) < 8:
                raise UserError(f"{path}: {size} bytes are too few for a safetensors file; download it again")
            length = int.from_bytes(first[:8], "little")
            if length > MAX_JSON:
                raise UserError(f"{path}: a header of {length} bytes (at most {MAX_JSON}); this is no safetensors file")
            if length > size - 8:
                raise UserError(f"{path}: truncated: a header of {length} bytes in a file of {size}; download it again")
            f.seek(8)
            raw = f.read(length)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    if len(raw) != length:
        raise UserError(f"{path}: the file ends inside its header; download it again")
    document = _object(parse_json(raw, f"{path}: the header", strict=True), f"{path}: the header")
    _metadata(document.pop("__metadata__", None), path)
    start = 8 + length
    tensors = {name: _entry(name, entry, path, start, size) for name, entry in document.items()}
    at = start
    for t in sorted(tensors.values(), key=attrgetter("begin", "end")):
        if t.begin != at:
            what = "overlaps the tensor before it" if t.begin < at else f"leaves a gap of {t.begin - at} bytes"
            raise UserError(f"{path}: tensor {t.name} {what}; the file is damaged")
        at = t.end
    if at != size:
        raise UserError(f"{path}: {size - at} bytes follow the last tensor; the file is damaged")
    return tensors


def _entry(name: str, entry: Any, path: Path, start: int, size: int) -> Located:
    """One entry of a header, checked on its own. start: where the file's data begins; size: of the whole file."""
    if len(name) > MAX_NAME or not name.isprintable() or not name:
        raise UserError(f"{path}: {shown(name)} is no tensor name (1 to {MAX_NAME} printable characters)")
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        raise UserError(f"{path}: tensor {name}: the header must give dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    width = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if width is None:
        raise UserError(f"{path}: tensor {name}: the dtype {shown(dtype)} is unknown to fp4ward")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not _counts(shape):
        raise UserError(f"{path}: tensor {name}: the shape {shown(shape)} is no list of at most {MAX_DIMENSIONS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _counts(offsets) or offsets[0] > offsets[1]:
        raise UserError(f"{path}: tensor {name}: data_offsets {shown(offsets)} are not [begin, end]")
    begin, end = start + offsets[0], start + offsets[1]
    nbytes = width * math.prod(shape)
    if nbytes != end - begin:
        raise UserError(f"{path}: tensor {name}: {dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    if end > size:
        raise UserError(f"{path}: truncated: tensor {name} ends at byte {end} of {size}; download the file again")
    return Located(name, dtype, tuple(shape), path, begin, end)


def _counts(values: list[Any]) -> bool:
    """All whole numbers from 0 to 2^63-1. A loop: a generator for each of 370,000 tensors takes twice as long."""
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value < 2**63:
            return False
    return True


def _metadata(value: Any, path: Path) -> None:
    if value is not None and (not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values())):
        raise UserError(f"{path}: '__metadata__' in the header is no map of strings")


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _config(path: Path) -> dict[str, Any]:
    """A config file: exporters write bare Infinity and worse into these, so the lenient reader of the formats."""
    return _object(parse_json(_read(path), path.name), path.name)


def _regular(path: Path) -> None:
    """No folder, no pipe (opening one would hang), no dangling link (how a cache shows an interrupted download)."""
    if not path.is_file():
        what = "not a file" if path.exists() else "missing (or a link to nothing); download it again"
        raise UserError(f"{path}: this is {what}")


def _read(path: Path) -> bytes:
    _regular(path)
    try:
        with open(path, "rb") as f:
            raw = f.read(MAX_JSON + 1)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    if len(raw) > MAX_JSON:
        raise UserError(f"{path}: larger than {MAX_JSON} bytes, so no file of this kind")
    if raw.startswith(LFS_POINTER):
        raise UserError(f"{path}: a Git LFS pointer, not the file; run 'git lfs pull' or download it")
    return raw


def parse_json(text: str | bytes, where: str, *, strict: bool = False) -> Any:
    """JSON as exporters write it: bare Infinity and NaN, and {"__float__": "Infinity"}, are numbers, and a key may be
    given twice with one value; strict: neither. UserError with `where` for what is malformed, too deep or too large."""

    def pairs(items: list[tuple[str, Any]]) -> Any:
        out = dict(items)
        seen: dict[str, Any] = {}
        for key, value in items if len(out) < len(items) else ():
            if key in seen and (strict or (seen[key] is not value and seen[key] != value)):  # a NaN differs from itself
                raise UserError(f"{where}: {shown(key)} is given twice{'' if strict else ' with different values'}")
            seen[key] = value
        if not strict and list(out) == ["__float__"] and isinstance(out["__float__"], str):
            return float(out["__float__"])
        return out

    def constant(name: str) -> float:
        if strict:
            raise UserError(f"{where} holds {name}, which is not JSON")
        return float(name)

    try:
        whole = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(whole, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as e:  # also bad UTF-8, numbers of thousands of digits, thousands of brackets
        raise UserError(f"{where}: not readable as JSON ({one_line(e)}); download the file again") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is no JSON object")
    return value
