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
    cache_at: list[torch.Tensor] = []
    logits_at: list[int] = []
    sequences: list[SequenceStep] = []
    for w, every in zip(work, all_logits, strict=True):
        r, first = w.request, w.request.computed
        start, reach = len(ids), first + w.count
        ids += r.all_token_ids[first:reach]
        positions += range(first, reach)
        pages = torch.tensor(r.pages[: -(-reach // page_size)])
        rows = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:reach]
        cache_at.append(rows[first:])
        if every:
            logits_at += range(start, len(ids))
        elif reach == r.num_tokens:
            logits_at.append(len(ids) - 1)
        assert r.slot is not None
        sequences.append(SequenceStep(start, len(ids), first, r.slot, rows.to(device)))
    return Step(
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        cache_at=torch.cat(cache_at).to(device),
        logits_at=torch.tensor(logits_at, dtype=torch.long, device=device),
        sequences=tuple(sequences),
    )
