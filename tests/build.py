"""Checkpoint folders for tests: a fixture or nothing to start from, changed freely, written in any layout.

A checkpoint is plain data: JSON documents and raw tensors (dtype, shape, bytes). No library writes the files, so
malformed ones are as easy as good ones.

    c = Checkpoint.of("q35moe-w4a16-modelopt")
    del c.tensors["lm_head.weight"]
    folder = c.save(tmp_path, shards=3)
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}


class Raw(NamedTuple):
    """A tensor as stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def f32(values: float | Iterable[float], shape: Iterable[int] | None = None) -> Raw:
        """From numbers; a single number gives shape [] unless a shape is given."""
        flat = [values] if isinstance(values, int | float) else list(values)
        default = () if isinstance(values, int | float) else (len(flat),)
        return Raw("F32", default if shape is None else tuple(shape), struct.pack(f"<{len(flat)}f", *flat))

    @staticmethod
    def fill(dtype: str, shape: Iterable[int], byte: int = 0) -> Raw:
        shape = tuple(shape)
        return Raw(dtype, shape, bytes([byte]) * (SIZES[dtype] * math.prod(shape)))

    @staticmethod
    def of(tensor: Any) -> Raw:
        """From a torch tensor."""
        import torch

        names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
        names |= {torch.float16: "F16", torch.int64: "I64"}
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return Raw(names[tensor.dtype], tuple(tensor.shape), flat.numpy().tobytes())

    def torch(self) -> Any:
        import torch

        types = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
        types |= {"F16": torch.float16, "I64": torch.int64}
        return torch.frombuffer(bytearray(self.data), dtype=types[self.dtype]).reshape(self.shape)

    def put(self, at: int, byte: int) -> Raw:
        """With one byte changed."""
        return self._replace(data=self.data[:at] + bytes([byte]) + self.data[at + 1 :])


@dataclass
class Checkpoint:
    """Documents (file name -> JSON value) and tensors, all free to change before `save`."""

    documents: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Raw] = field(default_factory=dict)

    @staticmethod
    def of(fixture: str | Path) -> Checkpoint:
        """All of a fixture (name or folder) but its test references."""
        folder = FIXTURES / fixture
        documents = {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*config.json"))}
        return Checkpoint(documents, read(folder / "model.safetensors"))

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.documents["config.json"]
        return config

    @property
    def text_config(self) -> dict[str, Any]:
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    def copy(self) -> Checkpoint:
        return copy.deepcopy(self)

    def rename(self, *pairs: tuple[str, str]) -> Checkpoint:
        """Replace parts of tensor names."""
        for old, new in pairs:
            self.tensors = {name.replace(old, new): t for name, t in self.tensors.items()}
        return self

    def save(self, folder: Path, *, shards: int = 1, index: bool | None = None) -> Path:
        """Write into `folder` (made if need be). index: write model.safetensors.index.json; default: when sharded."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in self.documents.items():
            (folder / name).write_text(json.dumps(document))
        if shards == 1:
            files = {"model.safetensors": self.tensors}
        else:
            names = list(self.tensors)
            files = {
                f"model-{i + 1:05d}-of-{shards:05d}.safetensors": {n: self.tensors[n] for n in names[i::shards]}
                for i in range(shards)
            }
        for name, tensors in files.items():
            write(folder / name, tensors)
        if index or (index is None and shards > 1):
            write_index(folder, {tensor: file for file, tensors in files.items() for tensor in tensors})
        return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    document = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def header(tensors: Mapping[str, Raw]) -> dict[str, Any]:
    """The header that describes `tensors` one after the other."""
    out: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        out[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    return out


def write(path: Path, tensors: Mapping[str, Raw]) -> Path:
    return write_raw(path, header(tensors), b"".join(t.data for t in tensors.values()))


def write_raw(path: Path, head: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file from any header (bytes as they are, else as JSON) and any data. length: the claimed header length."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def read(path: Path) -> dict[str, Raw]:
    """All tensors of a good file, in file order."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    entries.pop("__metadata__", None)
    order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: Raw(e["dtype"], tuple(e["shape"]), data[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
        for name, e in order
    }
