"""Logits -> one token a sequence, with log-probabilities where asked.

A row's token depends on its own logits, parameters and random stream only. So that this holds to the bit, in any batch
and on any device, nothing here adds floats over the vocabulary to choose a token: weights are exp((x - max) / t) in
units of 2^-40, as integers, whose sums are exact in any order; and tokens are ranked by (logit descending, id
ascending), an order without ties. One uniform draw a token picks from the summed weights.

Order of the steps, as in vLLM: log-probabilities of the unmodified logits; penalties; end tokens banned until
min_tokens; temperature; min_p; top_k; top_p; draw.

Shapes: B rows, R rows of a part of them, V vocabulary, K candidates, P tokens of the
outputs, Q of prompts too, T prompt positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4ward.runtime.request import Logprob, Request, SamplingParams

# A token 2^40 times less likely than the best has weight 0; V * 2^40 stays below 2^63 for V up to 2^23.
_ONE = float(2**40)
# Rows are taken in blocks, so that each [R, V] temporary of 8-byte elements stays under 64 MiB.
_BLOCK_ELEMENTS = 2**23
_NOT_FINITE = (
    "the model's logits for this request are not finite (NaN, infinity, or nothing left to choose), so it ends here; "
    "other requests go on"
)
# Above this many candidates a sort is not slower than a selection.
_TOP_K_SELECT = 1024


@dataclass(frozen=True)
class Sampled:
    """A row's result. error: one sentence when the logits hold no choice (token_id is -1 then)."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None
    error: str | None = None


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """logits [B, V], float32 or wider, unchanged by this; one request a row. Draws from random requests' generators.

    A row with NaN or +inf, or with nothing above -inf, fails alone. One device-to-host copy.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(requests), (logits.shape, len(requests))
    if not requests:
        return []
    x_BV = _modified(logits, requests)
    best_B, token_B = x_BV.max(-1)  # the first of equals; NaN wins over all
    bad_B = ~best_B.float().isfinite()
    if x_BV is not logits:
        bad_B |= ~logits.amax(-1).float().isfinite()

    random_rows = [i for i, request in enumerate(requests) if not request.params.greedy]
    if random_rows:
        draw_B = torch.tensor([requests[i].generator.random() for i in random_rows], dtype=torch.float64)
        draw_B = draw_B.to(logits.device)
        for part in _parts([requests[i].params for i in random_rows], logits.shape[1]):
            rows = torch.tensor([random_rows[j] for j in part], device=logits.device)
            params = [requests[random_rows[j]].params for j in part]
            x_RV = torch.where(bad_B[rows, None], 0.0, x_BV[rows].float())
            token_B[rows] = _draw(x_RV, params, draw_B[torch.tensor(part, device=logits.device)])

    asked = [(i, request.params.logprobs) for i, request in enumerate(requests) if request.params.logprobs is not None]
    k = min(max((k for _, k in asked), default=0), logits.shape[1])
    flat = [token_B.double(), bad_B.double()]
    for block in _blocks([i for i, _ in asked], logits.shape[1]):
        rows = torch.tensor(block, device=logits.device)
        flat.append(_logprob_table(logits[rows], token_B[rows], k).flatten())
    numbers: list[float] = torch.cat(flat).tolist()

    count, width = len(requests), 2 + 2 * k
    tables = {i: numbers[2 * count + j * width : 2 * count + (j + 1) * width] for j, (i, _) in enumerate(asked)}
    results = []
    for i, request in enumerate(requests):
        token, wanted = int(numbers[i]), request.params.logprobs
        if numbers[count + i]:
            results.append(Sampled(-1, error=_NOT_FINITE))
        else:
            results.append(Sampled(token, None if wanted is None else _logprob_dict(tables[i], token, min(wanted, k))))
    return results


def prompt_logprobs(logits: Tensor, targets: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """logits [T, V] and the T tokens that came next -> for each, its log-probability and those of the k likeliest."""
    assert logits.shape[0] == len(targets), (logits.shape, len(targets))
    k = min(k, logits.shape[1])
    results = []
    for block in _blocks(range(len(targets)), logits.shape[1]):
        chosen = [targets[t] for t in block]
        x_RV = logits[block[0] : block[-1] + 1]
        table = _logprob_table(x_RV, torch.tensor(chosen, device=logits.device), k).tolist()
        results += [_logprob_dict(row, token, k) for row, token in zip(table, chosen, strict=True)]
    return results


def _modified(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Penalties and min_tokens; the same tensor when no row has any."""
    banned = [
        (row, token)
        for row, request in enumerate(requests)
        if len(request.output_token_ids) < request.params.min_tokens
        for token in request.banned_until_min_tokens
        if token < logits.shape[1]
    ]
    penalised = [i for i, request in enumerate(requests) if request.params.penalised]
    if not banned and not penalised:
        return logits
    x_BV = logits.clone()
    if penalised:
        _penalise(x_BV, requests, penalised)
    if banned:
        index = torch.tensor(banned, device=logits.device)
        x_BV[index[:, 0], index[:, 1]] = -math.inf
    return x_BV


def _penalise(x_BV: Tensor, requests: Sequence[Request], rows: Sequence[int]) -> None:
    """In place, in float64 (a penalty may be beyond float32). Repetition: x / r where x > 0, x * r elsewhere, for
    tokens of prompt and output. Then x - frequency * count - presence, for tokens of the output."""
    device = x_BV.device
    counts = [Counter(requests[i].output_token_ids) for i in rows]
    said = [torch.tensor([*c], dtype=torch.int64) for c in counts]
    penalty = torch.tensor([_penalties(request.params) for request in requests], dtype=torch.float64, device=device)

    token_P, row_P = torch.cat(said).to(device), _owners(rows, said, device)
    if any(requests[i].params.repetition_penalty != 1.0 for i in rows):
        seen_Q = torch.cat([token_P, *(_prompt_seen(requests[i], device) for i in rows)])
        row_Q = torch.cat([row_P, _owners(rows, [requests[i].prompt_seen for i in rows], device)])
        x_Q = x_BV[row_Q, seen_Q].double()
        r_Q = penalty[row_Q, 0]
        # A token of prompt and output comes twice, with the same value both times.
        x_BV[row_Q, seen_Q] = torch.where(x_Q > 0, x_Q / r_Q, x_Q * r_Q).to(x_BV.dtype)
    if len(token_P):
        count_P = torch.tensor([n for c in counts for n in c.values()], dtype=torch.float64).to(device)
        less_P = penalty[row_P, 1] * count_P + penalty[row_P, 2]
        x_BV[row_P, token_P] = (x_BV[row_P, token_P].double() - less_P).to(x_BV.dtype)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _prompt_seen(request: Request, device: torch.device) -> Tensor:
    if request.prompt_seen is None:
        request.prompt_seen = torch.tensor(sorted(set(request.prompt_token_ids)), dtype=torch.int64).to(device)
    return request.prompt_seen


def _owners(rows: Sequence[int], tokens: Sequence[Tensor], device: torch.device) -> Tensor:
    """The row of each token in the concatenation of `tokens`."""
    return torch.repeat_interleave(torch.tensor(rows), torch.tensor([len(t) for t in tokens])).to(device)


def _parts(params: Sequence[SamplingParams], vocabulary: int) -> Iterator[list[int]]:
    """Rows that are drawn alike: without a ranking; by the few likeliest; by a sort. A row's kind is its own affair."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, one in enumerate(params):
        if one.top_k == 0 and one.top_p == 1.0:
            kinds[0].append(i)
        else:
            kinds[1 if 0 < one.top_k <= _TOP_K_SELECT else 2].append(i)
    for kind in kinds:
        yield from _blocks(kind, vocabulary)


def _blocks(rows: Sequence[int], vocabulary: int) -> Iterator[list[int]]:
    step = max(1, _BLOCK_ELEMENTS // vocabulary)
    for start in range(0, len(rows), step):
        yield list(rows[start : start + step])


def _draw(x_RV: Tensor, params: Sequence[SamplingParams], draw_R: Tensor) -> Tensor:
    """x_RV float32, one kind of `_parts`; draw_R in [0, 1) -> token [R]."""
    vocabulary = x_RV.shape[1]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=x_RV.device)[:, None]

    temperature = column([p.temperature for p in params])
    least = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])  # p >= min_p * p_max, in logs
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return _pick(_weights(x_RV, x_RV.amax(-1, keepdim=True), temperature, least), draw_R)

    top_k = [min(p.top_k or vocabulary, vocabulary) for p in params]
    id_RK = _likeliest(x_RV, max(top_k))
    x_RK = x_RV.gather(1, id_RK)
    w_RK = _weights(x_RK, x_RK[:, :1], temperature, least)
    w_RK *= torch.arange(id_RK.shape[1], device=x_RV.device) < column(top_k, torch.int64)
    # The shortest run of likeliest tokens whose share reaches top_p: a token stays while those before it fall short.
    sum_RK = w_RK.cumsum(-1)
    share = column([p.top_p for p in params])
    w_RK *= (sum_RK - w_RK).double() < share * sum_RK[:, -1:].double()
    return id_RK.gather(1, _pick(w_RK, draw_R)[:, None])[:, 0]


def _weights(x_RK: Tensor, best_R1: Tensor, temperature_R1: Tensor, least_R1: Tensor) -> Tensor:
    """exp((x - best) / temperature) in units of 2^-40 as int64, and 0 where the exponent is under `least`."""
    z_RK = (x_RK.double() - best_R1) / temperature_R1
    return torch.where(z_RK >= least_R1, z_RK.exp() * _ONE, 0.0).long()


def _pick(w_RK: Tensor, draw_R: Tensor) -> Tensor:
    """Index [R] of the weight in which the share `draw` of the sum falls."""
    sum_RK = w_RK.cumsum(-1)
    total_R = sum_RK[:, -1]
    aim_R = torch.minimum((draw_R * total_R.double()).long(), total_R - 1)
    return torch.searchsorted(sum_RK, aim_R[:, None], right=True)[:, 0]


def _likeliest(x_RV: Tensor, k: int) -> Tensor:
    """Ids [R, k] by (logit descending, id ascending): exact, whatever ties bf16 logits have.

    The key is the float's bits, made monotonic as a signed integer, above the reversed id.
    """
    bits = (x_RV.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = x_RV.shape[1] - 1
    key_RV = (bits.long() << 32) + torch.arange(last, -1, -1, device=x_RV.device)
    if k <= _TOP_K_SELECT:
        key_RK = key_RV.topk(k, dim=-1).values
    else:
        key_RK = key_RV.sort(dim=-1, descending=True).values[:, :k]
    return last - (key_RK & 0xFFFFFFFF)


def _logprob_table(x_RV: Tensor, token_R: Tensor, k: int) -> Tensor:
    """float64 [R, 2 + 2k]: log-probability and rank of `token`, then the k likeliest ids, then theirs."""
    logprob_RV = torch.log_softmax(x_RV.float(), dim=-1)
    x_RV = x_RV.float()
    x_R1 = x_RV.gather(1, token_R[:, None])
    lower_id = torch.arange(x_RV.shape[1], device=x_RV.device) < token_R[:, None]
    rank_R1 = 1 + ((x_RV > x_R1) | ((x_RV == x_R1) & lower_id)).sum(-1, keepdim=True)
    id_RK = _likeliest(x_RV, k) if k else token_R.new_empty(len(token_R), 0)
    columns = [logprob_RV.gather(1, token_R[:, None]), rank_R1, id_RK, logprob_RV.gather(1, id_RK)]
    return torch.cat([column.double() for column in columns], dim=1)


def _logprob_dict(row: Sequence[float], token: int, k: int) -> dict[int, Logprob]:
    """The token first, then the k likeliest. A row may hold more than k."""
    held = (len(row) - 2) // 2
    found = {token: Logprob(row[0], int(row[1]))}
    for place in range(k):
        found.setdefault(int(row[2 + place]), Logprob(row[2 + held + place], place + 1))
    return found
