"""Lays the tokens of a step flat, with the positions and state of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4ward.layers.step import SequenceStep, Step, Tables
from fp4ward.runtime.scheduler import Work


def flatten(
    work: Sequence[Work], page_size: int, device: torch.device, all_logits: Sequence[bool], table: Tensor | None = None
) -> Step:
    """The step for `work`. Logits are wanted of a sequence's last token when it completes what is known of the
    sequence, and of every token where all_logits says so. table: State's pages, for kernels."""
    ids: list[int] = []
    positions: list[int] = []
    logits_at: list[int] = []
    rows: list[torch.Tensor] = []
    for w, every in zip(work, all_logits, strict=True):
        r, first = w.request, w.request.computed
        start, reach = len(ids), first + w.count
        ids += r.tokens(first, reach)
        positions += range(first, reach)
        pages = torch.tensor(r.pages[: -(-reach // page_size)])
        rows.append((pages[:, None] * page_size + torch.arange(page_size)).flatten()[:reach])
        if every:
            logits_at += range(start, len(ids))
        elif reach == r.num_tokens:
            logits_at.append(len(ids) - 1)
    held = torch.cat(rows).to(device).split([len(own) for own in rows])  # one copy to the device for all sequences
    sequences: list[SequenceStep] = []
    at = 0
    for w, own in zip(work, held, strict=True):
        assert w.request.slot is not None
        sequences.append(SequenceStep(at, at + w.count, w.request.computed, w.request.slot, own))
        at += w.count
    single = [s for s in sequences if s.stop - s.start == 1]
    return Step(
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        cache_at=torch.cat([s.cache_rows[s.first_position :] for s in sequences]),
        logits_at=torch.tensor(logits_at, dtype=torch.long, device=device),
        sequences=tuple(sequences),
        single_at=torch.tensor([s.start for s in single], dtype=torch.long, device=device),
        single_slots=torch.tensor([s.slot for s in single], dtype=torch.long, device=device),
        tables=None if table is None else _tables(sequences, page_size, table[:, : width(work)]),
    )


def width(work: Sequence[Work]) -> int:
    """Columns of the page table that a step's kernels look at: as many as its longest sequence has pages, or up to
    twice as many, so that few numbers occur."""
    return 1 << (max(len(w.request.pages) for w in work) - 1).bit_length()


def _tables(sequences: Sequence[SequenceStep], page_size: int, pages: Tensor) -> Tables:
    slots, counts = [s.slot for s in sequences], [s.stop - s.start for s in sequences]
    owner = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    numbers = [*(s.start for s in sequences), len(owner), *slots, *owner]
    whole = torch.tensor(numbers, dtype=torch.int32).to(pages.device)
    starts, of, rows = whole.split([len(slots) + 1, len(slots), len(owner)])
    return Tables(starts, of, rows, pages, page_size)
