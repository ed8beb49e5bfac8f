"""What a rank's memory holds, computed before anything is allocated: weights, recurrent slots, pages, scratch.
The engine takes its pages by the same function. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp4ward.config import CACHE_SHARE, CPU_CACHE_BYTES, EngineConfig
from fp4ward.facts import PagedKv, StateSpec
from fp4ward.hardware import GIB, Hardware
from fp4ward.kernels.specs import EXPERTS, ITEM, LayerDesc
from fp4ward.pieces import Pieces

# Taken before any tensor: a CUDA context with its libraries, or an interpreter with torch. Assumed, not measured.
RESERVED = {False: int(0.6 * GIB), True: int(0.35 * GIB)}
KV_ITEM = {"fp8": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
GRAPHS = 1 << 28  # captured decoding steps and their activations; assumed, not measured
CHECKPOINTS = 0  # recurrent states of past prompts that a prefix cache keeps: there is none yet
DECODE_BLOCK = 3 * 4 << 23  # the reference decodes blocks of 2^23 weights to f32, with two temporaries


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank with the least room (`rank`). weights: a rank, `copied` of them second layouts that kernels
    want. page, slot: of one page of K and V, and of one sequence's recurrent state, over all layers. slots: of
    max_num_seqs. cache: what is there for pages. pages: how many the engine takes. context: longest request that they
    hold, at most max_model_len. scratch: of one step. graphs, checkpoints: of captured CUDA graphs, and of the
    recurrent states that a prefix cache keeps."""

    rank: int
    weights: tuple[int, ...]
    reserved: int
    scratch: int
    slot: int
    slots: int
    page: int
    pages: int
    cache: int
    free: int
    context: int
    block: int
    graphs: int
    checkpoints: int
    copied: int


def page_bytes(spec: Sequence[StateSpec], block: int, kv: str) -> int:
    """One page of K and V over all attention layers."""
    return sum(2 * block * s.heads * s.head_dim * KV_ITEM[kv] for s in spec if isinstance(s, PagedKv))


def slot_bytes(spec: Sequence[StateSpec], dtype: str) -> int:
    """One sequence's recurrent state over all layers: the convolution's past as activations, the rest in f32."""
    item, states = ITEM[dtype], (s for s in spec if not isinstance(s, PagedKv))
    return sum(math.prod(s.conv) * item + math.prod(s.ssm) * max(4, item) for s in states)


def wanted(config: EngineConfig) -> int:
    """Pages of max_num_seqs full sequences. config: resolved."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.block_size) * config.max_num_seqs


def pages(spec: Sequence[StateSpec], config: EngineConfig, free: int, scratch: int = 0) -> tuple[int, int]:
    """Pages of K and V to hold: what max_num_seqs full sequences need, or fewer; and the bytes that there are for them.
    free: what weights leave of the memory. scratch: bytes of it that a step needs. config: resolved."""
    page, budget = page_bytes(spec, config.block_size, config.kv_cache_dtype), config.kv_cache_memory_bytes
    if budget is None:
        slots = config.max_num_seqs * slot_bytes(spec, config.dtype)
        cap = CPU_CACHE_BYTES if config.device == "cpu" else free
        budget = min(cap, int(free * CACHE_SHARE), free - scratch) - slots
    most = wanted(config)
    return min(most, max(budget, 0) // page) if page else most, budget  # no attention layer: pages cost nothing


def measure(cut: Pieces, hw: Hardware, config: EngineConfig, copied: int) -> Memory:
    """Of the rank with the least room. config: resolved. copied: bytes of second layouts of weights, a rank."""
    assert config.max_model_len is not None
    reserved, scratch, found = RESERVED[hw.cpu], _scratch(cut.layers, config), []
    weights = tuple(w + copied for w in cut.weights)
    for rank, (own, spec) in enumerate(zip(weights, cut.states, strict=True)):
        page = page_bytes(spec, config.block_size, config.kv_cache_dtype)
        slot, free = slot_bytes(spec, config.dtype), hw.memory - reserved - own
        slots = config.max_num_seqs * slot
        graphs, checkpoints = 0 if hw.cpu or config.enforce_eager else GRAPHS, CHECKPOINTS * slot
        count, cache = pages(spec, config, free, scratch + graphs + checkpoints)
        free -= slots + count * page + graphs + checkpoints
        context = min(config.max_model_len, count * config.block_size)
        sizes = (slot, slots, page, count, cache, free, context, config.block_size, graphs, checkpoints, copied)
        found.append(Memory(rank, weights, reserved, scratch, *sizes))
    return min(found, key=lambda m: (m.context, m.free))


def _scratch(layers: Sequence[LayerDesc], config: EngineConfig) -> int:
    """Activations of a step as the references make them: the widest operation in f32 and in its own type, the residual
    stream, the logits of every sequence, and one block of decoded weights."""
    tokens, item = config.max_num_batched_tokens, ITEM[config.dtype]
    widest = logits = hidden = 0
    for layer in layers:
        n, k = layer.local[0][-2:]
        if layer.scored:
            logits = config.max_num_seqs * layer.shape[0] * (item + 12)  # in their type, f32, and sorted for sampling
        elif layer.op == "embedding":
            hidden = 4 * tokens * k * item
        elif layer.op in EXPERTS:
            widest = max(widest, tokens * (4 * n + 3 * k) * (4 + item))
        elif layer.op == "linear":
            widest = max(widest, tokens * (2 * n + k) * (4 + item))
        else:  # heads of K and V, of state: q, k, v and their copies in f32
            widest = max(widest, tokens * 6 * layer.local[0][0] * k * 4 + (1 << 27))
    return widest + logits + hidden + DECODE_BLOCK


def failures(m: Memory, hw: Hardware, config: EngineConfig, asked_length: int | None) -> tuple[str, ...]:
    """Why it does not fit, in sentences; () if it does. asked_length: --max-model-len where the user gave one."""
    own, room = m.weights[m.rank], hw.memory - m.reserved
    where = f"rank {m.rank} of {len(m.weights)}" if len(m.weights) > 1 else hw.name
    holds = f"{where} has room for {max(room, 0) / GIB:.1f} GiB, weights take {own / GIB:.1f}"
    holds += f" ({m.copied / GIB:.1f} of them a second layout)" * bool(m.copied)
    if own > room:
        return (holds,)
    if m.pages < 1:
        slots = f"{config.max_num_seqs} recurrent slots {m.slots / GIB:.1f}"
        cache = f"the KV cache gets {max(m.cache, 0) / 2**20:.0f} MiB, but one page of {m.block} tokens takes"
        return (f"{holds} and {slots}: {cache} {m.page / 2**20:.2f} MiB",)
    if m.free < m.scratch:
        step = f"a step of {config.max_num_batched_tokens} tokens needs about {m.scratch / GIB:.1f}"
        return (f"{holds}; cache and slots leave {m.free / GIB:.1f}, and {step}",)
    if asked_length is not None and m.context < asked_length:
        return (f"--max-model-len {asked_length}: {where} has room for {m.context} tokens of one request",)
    return ()
