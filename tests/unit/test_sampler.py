"""The sampler against slow float64 definitions of each rule, written here a second time."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.runtime import sampler
from fp4ward.runtime.request import Request, SamplingParams, generator
from fp4ward.runtime.sampler import prompt_logprobs, sample

V = 50


def request(prompt=(1, 2), output=(), counter=0, eos=(), **params) -> Request:
    sampling = SamplingParams(**{"max_tokens": None, **params})
    stream = generator(sampling, 11, counter)
    return Request(str(counter), list(prompt), sampling, tuple(eos), stream, output_token_ids=list(output))


def token(logits, one: Request) -> int:
    (result,) = sample(torch.as_tensor(logits)[None], [one])
    assert result.error is None
    return result.token_id


class Fixed(random.Random):
    """A stream that gives the listed draws."""

    def __init__(self, draws):
        super().__init__()
        self.draws = list(draws)

    def random(self):
        return self.draws.pop(0)


def probabilities(logits, p: SamplingParams) -> list[float]:
    """Slow and plain: temperature, then min_p, top_k, top_p over tokens by (logit descending, id ascending)."""
    x = [float(v) for v in logits]
    weights = [math.floor(2**40 * math.exp((v - max(x)) / p.temperature)) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = [i for i in order[: p.top_k or len(x)] if weights[i] >= p.min_p * 2**40]
    total, run, nucleus = sum(weights[i] for i in kept), 0, []
    for i in kept:
        if run >= p.top_p * total:
            break
        nucleus.append(i)
        run += weights[i]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(x))]


def frequencies(logits, draws: int = 1000, **params) -> list[float]:
    """Shares of each token over evenly spread draws, which shows the exact distribution to 1/draws a token."""
    requests = [request(**params) for _ in range(draws)]
    for i, one in enumerate(requests):
        one.generator = Fixed([(i + 0.5) / draws])
    counts = [0] * len(logits)
    for result in sample(torch.as_tensor(logits).expand(draws, -1), requests):
        counts[result.token_id] += 1
    return [c / draws for c in counts]


def test_greedy_takes_the_lowest_of_equals():
    x = torch.zeros(3, V)
    x[1, [7, 30]] = 4.0
    x[2, V - 1] = 1.0
    assert [r.token_id for r in sample(x, [request(temperature=0) for _ in range(3)])] == [0, 7, V - 1]
    assert sample(x[:0], []) == []


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_k": V},
        {"top_k": 4000},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
        {"top_p": 0.95, "min_p": 0.1},
    ],
)
def test_distribution_is_the_definitions(params):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 2
    expected = probabilities(logits, SamplingParams(**params))
    found = frequencies(logits, **params)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1.5 / 1000
    assert all(e > 0 for e, f in zip(expected, found, strict=True) if f > 0)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.integers(0, 13),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)
def test_kept_sets_with_many_ties_are_the_definitions(logits, temperature, top_k, top_p, min_p):
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = probabilities(logits, SamplingParams(**params))
    found = frequencies([float(x) for x in logits], draws=50, **params)
    for e, f in zip(expected, found, strict=True):
        assert abs(e - f) <= 1 / 50 + 1e-9
        assert f == 0 or e > 0


def test_random_draws_fit_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0])
    exact = torch.softmax(logits.double(), 0).tolist()
    draws = 6000
    results = sample(logits.expand(draws, -1), [request(counter=i) for i in range(draws)])
    counts = [sum(r.token_id == t for r in results) for t in range(5)]
    chi2 = sum((c - draws * p) ** 2 / (draws * p) for c, p in zip(counts, exact, strict=True))
    assert chi2 < 23.5  # 4 degrees of freedom, 1e-4

    one, counts = request(seed=5), [0] * 5  # the stream of one request over time
    for _ in range(2000):
        counts[token(logits, one)] += 1
    chi2 = sum((c - 2000 * p) ** 2 / (2000 * p) for c, p in zip(counts, exact, strict=True))
    assert chi2 < 23.5


def test_ends_of_the_draw_stay_in_the_kept_set():
    x = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]])
    for draw, expected in [(0.0, 1), (math.nextafter(0.5, 0), 1), (0.5, 2), (math.nextafter(1.0, 0.0), 2)]:
        for params in ({}, {"top_p": 0.999999}, {"top_k": 4}):
            one = request(**params)
            one.generator = Fixed([draw])
            assert token(x[0], one) == expected


def test_top_k_one_is_greedy_even_among_equals_and_tiny_temperature_is_stable():
    x = torch.zeros(V)
    x[[9, 20, 33]] = 3.0
    assert {token(x, request(top_k=1, counter=i)) for i in range(20)} == {9}
    assert {token(x, request(temperature=2e-5, counter=i)) for i in range(40)} == {9, 20, 33}
    assert token(torch.tensor([1e30, -1e30, 0.0]), request(temperature=1e-4)) == 0


def every_kind() -> list[Request]:
    kinds: list[dict] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.5},
        {"min_p": 0.1, "temperature": 1.5},
        {"seed": 4, "repetition_penalty": 1.3, "prompt": (3, 4, 5), "output": (4, 4, 7)},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5, "output": (1, 1, 2)},
        {"min_tokens": 3, "eos": (0, 1), "stop_token_ids": [2]},
        {"logprobs": 2, "top_k": 5},
        {"logprobs": 0, "temperature": 0.0},
        {"top_k": 2000},
    ]
    return [request(counter=i, **{"max_tokens": None, **kind}) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [V, 3001])  # beyond 1024 the two ways to rank differ
def test_a_row_alone_is_the_row_in_a_batch(dtype, vocabulary, monkeypatch):
    x = torch.randn(12, vocabulary, dtype=dtype, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    kept = x.clone()
    together = sample(x, every_kind())
    assert torch.equal(x, kept)  # the caller's logits are as they were
    alone = [sample(x[i : i + 1], [one])[0] for i, one in enumerate(every_kind())]
    assert together == alone
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2)).tolist()
    requests = every_kind()
    shuffled = sample(x[order], [requests[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(12)] == alone
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 2 * vocabulary)  # blocks of two rows
    assert sample(x, every_kind()) == alone


def test_the_same_seed_gives_the_same_tokens():
    x = torch.randn(30, V, generator=torch.Generator().manual_seed(1))

    def run(**params):
        one = request(**params)
        return [token(row, one) for row in x]

    assert run(seed=3, counter=1) == run(seed=3, counter=99)
    assert run(seed=3) != run(seed=4)
    assert run(counter=1) != run(counter=2)
    assert run(counter=1) == run(counter=1)


def test_penalties_follow_their_formulas():
    x = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(8)) * 3
    prompt, output = (3, 3, 10, 11), (11, 12, 12, 13)
    one = request(prompt, output, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.9)
    found = sampler._modified(x[None], [one])[0]
    for t in range(V):
        value = float(x[t])
        if t in prompt or t in output:
            value = value / 1.7 if value > 0 else value * 1.7
        value -= -0.9 * output.count(t) + (0.4 if t in output else 0.0)
        assert float(found[t]) == pytest.approx(value, rel=1e-12)
    # only the prompt seen so far: presence and frequency do nothing
    none = request(prompt, (), presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(sampler._modified(x[None], [none])[0], x)


def test_min_tokens_bans_end_and_stop_tokens_until_then():
    x = torch.zeros(V)
    x[[1, 2, 9]] = torch.tensor([9.0, 8.0, 7.0])
    params = {"temperature": 0, "min_tokens": 2, "eos": (1,), "stop_token_ids": [2, V + 5]}
    assert token(x, request(output=(0,), **params)) == 9
    assert token(x, request(output=(0, 0), **params)) == 1
    assert token(x, request(output=(0,), ignore_eos=True, **params)) == 9  # as in vLLM


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 3}])
def test_a_row_of_nan_fails_alone(poison, params):  # F34
    x = torch.randn(5, V, generator=torch.Generator().manual_seed(2))
    clean = sample(x, [request(counter=i, **params) for i in range(5)])
    x[1, :] = poison
    x[2, 17] = poison
    x[3, :] = -math.inf
    results = sample(x, [request(counter=i, **params) for i in range(5)])
    assert [r.error is None for r in results] == [True, False, False, False, True]
    assert all("finite" in r.error and r.token_id == -1 for r in results[1:4])
    assert (results[0], results[4]) == (clean[0], clean[4])


def test_nan_hidden_by_a_ban_and_a_ban_of_everything_fail_too():  # F34
    x = torch.zeros(2, 3)
    x[0, 1] = math.nan
    banned = {"min_tokens": 1, "temperature": 0}
    results = sample(x, [request(eos=(1,), **banned), request(eos=(0, 1, 2), **banned)])
    assert results[0].error and results[1].error


def test_logprobs_are_those_of_the_unmodified_logits():
    x = torch.randn(2, V, generator=torch.Generator().manual_seed(5))
    exact = torch.log_softmax(x.double(), -1)
    settings = {"logprobs": 3, "temperature": 0.2, "top_k": 2, "presence_penalty": 2.0, "output": (0, 1, 2, 3, 4)}
    for row, result in enumerate(sample(x, [request(**settings), request(logprobs=0, temperature=0)])):
        order = exact[row].argsort(descending=True).tolist()
        expected = list(dict.fromkeys([result.token_id, *order[: 0 if row else 3]]))
        assert list(result.logprobs) == expected
        for t, entry in result.logprobs.items():
            assert entry.logprob == pytest.approx(float(exact[row, t]), abs=1e-6)
            assert entry.rank == order.index(t) + 1
    assert sample(x[:1], [request()])[0].logprobs is None
    many = sample(x[:1, :4], [request(logprobs=20)])[0].logprobs  # a vocabulary smaller than what is asked for
    assert sorted(many) == [0, 1, 2, 3]


def test_prompt_logprobs_score_the_tokens_that_came_next(monkeypatch):
    x = torch.randn(7, V, generator=torch.Generator().manual_seed(6))
    targets = [3, 0, 49, 7, 7, 1, 2]
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 3 * V)
    exact = torch.log_softmax(x.double(), -1)
    found = prompt_logprobs(x, targets, 2)
    assert len(found) == 7
    for t, (entry, target) in enumerate(zip(found, targets, strict=True)):
        assert next(iter(entry)) == target
        assert entry[target].logprob == pytest.approx(float(exact[t, target]), abs=1e-6)
        assert {*entry} == {target, *exact[t].topk(2).indices.tolist()}
    assert [len(e) for e in prompt_logprobs(x, targets, 0)] == [1] * 7
    assert prompt_logprobs(x[:0], [], 3) == []


def test_order_key_ranks_every_float_as_comparison_does():
    values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf, 1.0, -1.0]
    found = sampler._likeliest(torch.tensor([values]), len(values))[0].tolist()
    assert found == sorted(range(len(values)), key=lambda i: (-values[i], i))
