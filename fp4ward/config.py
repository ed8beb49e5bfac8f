"""What a user may set about the engine, and how "auto" becomes a value. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp4ward.errors import UserError

DTYPES = ("bfloat16", "float16", "float32", "float64")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
# Names of a KV cache's element type: ours, and vLLM's for the same thing.
KV_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "f16": "f16", "float16": "f16", "fp8": "fp8", "fp8_e4m3": "fp8",
    "f32": "f32", "float32": "f32", "f64": "f64", "float64": "f64",
}  # fmt: skip
SIZE_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "B": 1,
}  # fmt: skip
# Cache size where the user names none: what max_num_seqs full sequences need, but no more than this on a CPU, and no
# more than this share of what the weights left free (the rest is for activations).
CPU_CACHE_BYTES = 4 << 30
CACHE_SHARE = 0.8
# On a CPU in float32, weights that take no more than this as plain f32 are unpacked at load: a small model then decodes
# several times faster. A larger one stays packed, so that 20 GB of weights run in 24 GB of memory.
UNPACK_BYTES = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. "auto" and None are decided by `resolve`, which returns a new EngineConfig.

    model: folder or Hugging Face id. revision: of the id. dtype: of activations and computation, "auto" or one of
    DTYPES. device: "auto", "cpu", "cuda" or "cuda:1". kv_cache_dtype: "auto" or a key of KV_DTYPES. max_model_len:
    tokens of prompt and answer together. max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of
    one step (a longer prompt is computed in chunks). block_size: tokens of one page of the KV cache.
    kv_cache_memory_bytes: size of the cache, None lets the engine choose. kernel: "op=name[,name]", the kernels that an
    operation may use. load_format: of LOAD_FORMATS; "dummy" reads no weights but draws them (checkpoint.dummy), by
    headers or, without any, by JSON alone. seed: of requests that bring none, and of dummy weights. enforce_eager: no
    CUDA graphs.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    kernel: Sequence[str] = ()
    load_format: str = "auto"
    seed: int = 0
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise UserError(f"model={self.model!r}: a folder or a Hugging Face id is expected")
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise UserError(f"revision={self.revision!r}: a branch, tag or commit is expected")
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_DTYPES))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise UserError(f"device={self.device!r}: auto, cpu, cuda or cuda:N is expected")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if isinstance(self.kernel, str) or not all(isinstance(one, str) for one in self.kernel):
            raise UserError(f"kernel={self.kernel!r}: a list of texts such as 'experts=reference_experts' is expected")
        if not isinstance(self.enforce_eager, bool):
            raise UserError(f"enforce_eager={self.enforce_eager!r}: true or false is expected")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed!r}: a whole number from 0 to 2^63-1 is expected")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                f"a step could not give every sequence its next token"
            )


def resolve(
    cfg: EngineConfig,
    *,
    cuda: bool,
    checkpoint_dtype: str,
    checkpoint_kv: str | None,
    max_position_embeddings: int,
) -> EngineConfig:
    """A new config in which device, dtype, kv_cache_dtype, max_model_len and load_format are values.

    cuda: whether a GPU can be used. checkpoint_dtype: config.json's dtype ("bfloat16"). checkpoint_kv: "fp8" when the
    checkpoint says that its KV cache is, else None. kv_cache_dtype becomes "bf16", "f16", "fp8", "f32" or "f64".

    dtype "auto" is the checkpoint's on a GPU and float32 on a CPU: most CPUs emulate bf16 products, which is slower
    than f32 and less exact, and the quantized weights stay packed either way.
    """
    device = cfg.device
    if device == "auto":
        device = "cuda:0" if cuda else "cpu"
    elif device == "cuda":
        device = "cuda:0"
    if device != "cpu" and not cuda:
        raise UserError(f"device={cfg.device}: no usable NVIDIA GPU was found (`fp4ward env` shows what is); use cpu")
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else checkpoint_dtype.removeprefix("torch.")
        if dtype not in DTYPES:
            raise UserError(
                f"config.json: {checkpoint_dtype!r} is no dtype to compute in; set dtype to one of {', '.join(DTYPES)}"
            )
    kv = "fp8" if cfg.kv_cache_dtype == "auto" and checkpoint_kv == "fp8" else cfg.kv_cache_dtype
    kv = KV_DTYPES[dtype if kv == "auto" else kv]
    length = cfg.max_model_len
    if length is None:
        length = max_position_embeddings
    elif length > max_position_embeddings:
        raise UserError(
            f"max_model_len={length} is more than the model was made for (max_position_embeddings="
            f"{max_position_embeddings} in config.json)"
        )
    form = "safetensors" if cfg.load_format == "auto" else cfg.load_format
    return replace(cfg, device=device, dtype=dtype, kv_cache_dtype=kv, max_model_len=length, load_format=form)


def parse_size(text: str) -> int:
    """Bytes from "4GiB", "4G", "500MB", "1.5g" or a plain number.

    As in vLLM, a small letter counts in thousands (1g = 10^9) and a capital one in 1024s (1G = 2^30).
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    if match is None or match[2] not in SIZE_UNITS:
        raise UserError(f"{text!r} is no size; a number with a unit such as 4GiB, 500MB or 1024 is expected")
    whole, _, fraction = match[1].partition(".")
    size = int(whole + fraction) * SIZE_UNITS[match[2]] // 10 ** len(fraction)
    if size <= 0:
        raise UserError(f"{text!r}: a size above 0 is expected")
    return size


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{name}={value!r}: one of {', '.join(allowed)} is expected")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise UserError(f"{name}={value!r}: a whole number above 0 is expected")
