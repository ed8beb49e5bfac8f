"""What one step of the engine hands to every layer: where each sequence's tokens and state are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a step: rows start..stop of the flat tokens, the first one at `first_position`.

    slot: its recurrent slot. cache_rows [C]: flat cache positions of tokens 0 .. first_position + (stop - start) - 1.
    """

    start: int
    stop: int
    first_position: int
    slot: int
    cache_rows: Tensor


@dataclass(frozen=True)
class Tables:
    """A step's sequences for kernels, int32 on the device. starts [B+1]: first row of each, and the end. slots [B].
    owner [T]: each row's slot. pages [slots, P]: page p of a slot's sequence; a page has `page_size` tokens."""

    starts: Tensor
    slots: Tensor
    owner: Tensor
    pages: Tensor
    page_size: int


@dataclass(frozen=True)
class Step:
    """A flat batch of T tokens. cache_at [T]: where the cache keeps each of them. logits_at [L]: rows to score.

    single_at, single_slots: row and recurrent slot of every sequence that has one token in this step (decoding), made
    once for all layers. Groups of ranks with requests of their own take equally many tokens: rows of no sequence are
    padding, and the cache keeps them where no sequence looks. tables: on GPUs.
    """

    token_ids: Tensor
    positions: Tensor
    cache_at: Tensor
    logits_at: Tensor
    sequences: tuple[SequenceStep, ...]
    single_at: Tensor
    single_slots: Tensor
    tables: Tables | None = None


@dataclass
class KvCache:
    """One attention layer's K and V, [pages * page_size, heads, D] each, and the scales of an FP8 cache."""

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass
class RecurrentState:
    """One recurrent layer's state by slot: conv [slots, C, W-1] and ssm [slots, N, Dk, Dv] in f32 (f64 for f64)."""

    conv: Tensor
    ssm: Tensor
