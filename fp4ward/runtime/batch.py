"""Lays the tokens of a step flat, with the positions and state of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4ward.layers.step import SequenceStep, Step
from fp4ward.runtime.scheduler import Work


def flatten(work: Sequence[Work], page_size: int, device: torch.device, all_logits: Sequence[bool]) -> Step:
    """The step for `work`. Logits are wanted of a sequence's last token when it completes what is known of the
    sequence, and of every token where all_logits says so."""
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
    )
