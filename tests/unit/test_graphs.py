"""What kernels are told of a step; that a decoding step replayed as a CUDA graph is the step itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward import LLM, SamplingParams
from fp4ward.runtime.batch import flatten, width
from fp4ward.runtime.graphs import Graphs
from fp4ward.runtime.pool import Pool
from fp4ward.runtime.request import Request
from fp4ward.runtime.scheduler import Limits, Scheduler, Work
from fp4ward.runtime.state import State

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, PAGE = torch.device("cpu"), 4
FIXTURES = Path(__file__).parent.parent / "fixtures"


def empty_state(slots: int, columns: int) -> State:
    return State([], PAGE, torch.full((slots, columns), -1, dtype=torch.int32), [0] * slots)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=8),
    pages=st.integers(8, 14),
    budget=st.integers(1, 24),
)
def test_the_table_on_the_device_has_every_sequences_pages(jobs, pages, budget):  # after preemptions, too
    scheduler = Scheduler(Limits(3, budget, 32, PAGE), Pool(pages), Pool(3))
    state = empty_state(3, 8)
    for i, (prompt, output) in enumerate(jobs):
        scheduler.add(Request(str(i), list(range(1, prompt + 1)), SamplingParams(max_tokens=output)))
    while work := scheduler.schedule():
        state.place(work)
        step = flatten(work, PAGE, CPU, [False] * len(work), state.pages)
        tables, rows = step.tables, []
        assert tables is not None and tables.pages.shape[1] == width(work) <= 8
        for row, slot in enumerate(tables.owner.tolist()):
            position = int(step.positions[row])
            rows.append(int(tables.pages[slot, position // PAGE]) * PAGE + position % PAGE)
        assert rows == step.cache_at.tolist()
        assert tables.starts.tolist() == [*(s.start for s in step.sequences), len(rows)]
        assert tables.slots.tolist() == [s.slot for s in step.sequences]
        for w in work:
            w.request.computed += w.count
            if w.request.computed == w.request.num_tokens:
                w.request.append(7)
                w.request.finish_if_done(32)
                if w.request.finished:
                    scheduler.finish(w.request)


def test_only_steps_in_which_every_sequence_decodes_are_replayed():
    graphs = object.__new__(Graphs)
    graphs.most = 2
    done, chunk = Request("0", [1, 2, 3], SamplingParams()), Request("1", [1, 2, 3], SamplingParams())
    done.computed, chunk.computed = 2, 1
    assert graphs.takes([Work(done, 1), Work(done, 1)])
    assert not graphs.takes([Work(chunk, 1)]) and not graphs.takes([Work(chunk, 2)])
    assert not graphs.takes([Work(done, 1)] * 3)


@GPU
@pytest.mark.parametrize("name", ["q35moe-w4a16-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"])
def test_replayed_steps_give_the_same_tokens(name):
    """Requests of many lengths that come and go, among them pages given back and taken anew."""
    torch.manual_seed(0)
    prompts = [torch.randint(3, 200, (n,)).tolist() for n in (1, 5, 17, 40, 3, 64, 2, 33, 9)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=1) for n in (40, 3, 25, 60, 1, 30, 90, 12, 50)]
    answers = []
    for eager in (True, False):
        kernel = ["experts=cuda_w4a16_experts,reference_experts"] if "moe" in name else []
        llm = LLM(
            str(FIXTURES / name), device="cuda", dtype="bfloat16", enforce_eager=eager, max_num_seqs=6, kernel=kernel,
            max_model_len=160, kv_cache_memory_bytes=1 << 20,
        )  # fmt: skip
        graphs = llm.engine.runner.graphs
        assert (graphs is None) == eager
        answers.append([o.outputs[0] for o in llm.generate(prompts, params)])
        if graphs is not None:
            captured = [size for size, graph in graphs.graphs.items() if graph is not None]
            assert {sequences for sequences, _ in captured} >= {1, 2, 5, 6}
    for plain, replayed in zip(*answers, strict=True):
        assert plain.token_ids == replayed.token_ids and plain.logprobs == replayed.logprobs
