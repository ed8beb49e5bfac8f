"""The scheduler keeps its books whatever arrives, and everybody finishes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.errors import UserError
from fp4ward.runtime.pool import Pool
from fp4ward.runtime.request import Request, SamplingParams
from fp4ward.runtime.scheduler import Limits, Scheduler


def scheduler(pages: int = 8, slots: int = 3, budget: int = 16, page: int = 4, length: int = 32) -> Scheduler:
    return Scheduler(Limits(slots, budget, length, page), Pool(pages), Pool(slots))


def request(number: int, prompt: int, output: int) -> Request:
    return Request(str(number), list(range(1, prompt + 1)), SamplingParams(max_tokens=output), eos_token_ids=())


def test_pool_refuses_a_double_return():
    pool = Pool(2)
    taken = pool.take(1)
    pool.give(taken)
    with pytest.raises(RuntimeError):
        pool.give(taken)
    assert pool.take(3) is None and pool.free == 2


def test_a_pool_takes_memory_for_what_is_in_use_only():
    pool = Pool(2**40)  # pages of a long context without attention layers, which cost nothing
    taken = pool.take(3)
    pool.give([1, 0])
    assert taken == [0, 1, 2] and pool.take(3) == [0, 1, 3] and pool.free == 2**40 - 4
    assert pool.take(2**40) is None and pool.free == 2**40 - 4


def test_requests_that_can_never_run_are_refused():
    s = scheduler()
    for prompt, output, says in ((0, 1, "empty"), (32, 1, "leaves no room")):
        with pytest.raises(UserError, match=says):
            s.add(request(0, prompt, output))
    with pytest.raises(AssertionError):
        scheduler(pages=4)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(0, 6)), min_size=1, max_size=12),
    pages=st.integers(8, 16),
    slots=st.integers(1, 4),
    budget=st.integers(1, 24),
    aborts=st.sets(st.integers(0, 11)),
)
def test_every_request_finishes_and_everything_comes_back(jobs, pages, slots, budget, aborts):
    s = scheduler(pages, slots, budget)
    arrivals = sorted(((at, i) for i, (_, _, at) in enumerate(jobs)), reverse=True)
    requests = {i: request(i, p, o) for i, (p, o, _) in enumerate(jobs)}
    done = set()
    for now in range(3000):
        while arrivals and arrivals[-1][0] <= now:
            s.add(requests[arrivals.pop()[1]])
        work = s.schedule()
        if not work and not arrivals:
            break
        held = [p for r in s.running for p in r.pages]
        assert len(held) == len(set(held)) == pages - s.pages.free  # no page belongs to two sequences
        assert len({r.slot for r in s.running}) == len(s.running) == slots - s.slots.free
        assert sum(w.count for w in work) <= budget and len({id(w.request) for w in work}) == len(work)
        assert all(not r.pages and r.slot is None and r.computed == 0 for r in s.waiting)
        for w in work:
            r = w.request
            assert 0 < w.count <= r.num_tokens - r.computed
            assert len(r.pages) * 4 >= r.computed + w.count
            r.computed += w.count
            if r.computed == r.num_tokens:
                r.output_token_ids.append(0)
                number = int(r.request_id)
                if len(r.output_token_ids) == r.params.max_tokens or (number in aborts and number % 2):
                    s.finish(r)
                    done.add(number)
    assert done == set(requests)
    assert s.pages.free == pages and s.slots.free == slots
