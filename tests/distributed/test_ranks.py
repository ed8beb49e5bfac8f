"""Ranks give one rank's numbers: the real forward on a real checkpoint in float64, each rank a thread of this process,
their collectives sums and concatenations in memory. Whatever blocks stay whole, and however ranks share the work."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from fp4ward.checkpoint.index import open_index
from fp4ward.checkpoint.load import load
from fp4ward.facts import PagedKv
from fp4ward.facts import qwen3_5 as facts
from fp4ward.kernels import experts as experts_kernel
from fp4ward.kernels import linear
from fp4ward.layers.step import KvCache, RecurrentState, SequenceStep, Step
from fp4ward.models import qwen3_5 as model
from fp4ward.parallel import collectives
from fp4ward.parallel.collectives import Mesh
from fp4ward.parallel.placement import Layout, Replicate
from fp4ward.pieces import block_of, whole_blocks

MOE, DENSE = "q35moe-w4a16-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
# One request a group; its last token is a step of its own. The last group has none: it only serves others' tokens.
PROMPTS = tuple(
    torch.tensor(ids, dtype=torch.long)
    for ids in ([364, 64, 351, 242, 7, 99, 500], [12, 400, 3], [77, 78, 79, 80, 301], [])
)
SCRATCH = 15  # of 16 cache positions: where padding goes


class Meeting:
    """Threads that meet at every collective, and how often they did."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self.barrier, self.given = threading.Barrier(len(self.members), timeout=60), {}
        self.met: Counter[str] = Counter()

    def exchange(self, x: torch.Tensor, rank: int, what: str) -> list[torch.Tensor]:
        self.met[what] += rank == self.members[0]
        self.given[rank] = x
        self.barrier.wait()
        every = [self.given[r] for r in self.members]
        self.barrier.wait()
        return every


@dataclasses.dataclass(frozen=True)
class Member:
    """What stands for a process group: the meeting, seen from one rank."""

    meeting: Meeting
    rank: int


def all_reduce(x, me):
    return x if me is None else torch.stack(me.meeting.exchange(x, me.rank, "sum")).sum(0)


def all_gather(x, me, dim):
    return x if me is None else torch.cat(me.meeting.exchange(x, me.rank, f"gather {dim}"), dim)


def reduce_scatter(x, me):
    if me is None:
        return x
    rows = sum(me.meeting.exchange(x, me.rank, "scatter")).chunk(len(me.meeting.members))
    return rows[me.meeting.members.index(me.rank)]


def meshes(layout: Layout) -> tuple[list[Mesh], list[Meeting]]:
    """Of every rank; a group of one rank is none."""
    size = layout.attention
    tensor = [Meeting(range(g * size, (g + 1) * size)) for g in range(layout.adp)]
    groups = [Meeting(range(t, layout.tp, size)) for t in range(size)]

    def member(meeting: Meeting, rank: int) -> Any:
        return Member(meeting, rank) if len(meeting.members) > 1 else None

    found = [Mesh(layout, r, member(tensor[r // size], r), member(groups[r % size], r)) for r in range(layout.tp)]
    return found, [*tensor, *groups]


def step(ids: torch.Tensor, first: int, last: int, rows: int) -> Step:
    """Tokens first..last-1 of a prompt, as far as it has them, in a step of `rows`."""
    n = len(ids[first:last])
    pad = (0, rows - n)
    at, none = torch.arange(first, first + n), torch.empty(0, dtype=torch.long)
    one = (torch.tensor([0]), torch.tensor([0])) if n == 1 else (none, none)
    sequences = (SequenceStep(0, n, first, 0, torch.arange(first + n)),) if n else ()
    tokens, positions = (functional.pad(x, pad) for x in (ids[first:last], at))
    return Step(tokens, positions, functional.pad(at, pad, value=SCRATCH), torch.arange(n), sequences, *one)


def states(cfg: facts.Config, rank: int, ranks: int, whole: set[str]) -> list[KvCache | RecurrentState]:
    state: list[KvCache | RecurrentState] = []
    for i, (own, full) in enumerate(zip(facts.state_spec(cfg, rank, ranks), facts.state_spec(cfg), strict=True)):
        spec = full if {f"layers.{i}.self_attn", f"layers.{i}.linear_attn"} & whole else own
        if isinstance(spec, PagedKv):
            k, v = (torch.zeros(16, spec.heads, spec.head_dim, dtype=torch.float64) for _ in range(2))
            state.append(KvCache(k, v))
        else:
            conv, ssm = (torch.zeros(1, *shape, dtype=torch.float64) for shape in (spec.conv, spec.ssm))
            state.append(RecurrentState(conv, ssm))
    return state


def logits(
    folder: Path,
    layout: Layout,
    replicate: Sequence[str] = (),
    prompts: Sequence[torch.Tensor] = PROMPTS,
    seen_as: int = 0,
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Of every token of its group's prompt, as each rank has them; and how often the first group and the first ranks of
    all groups met for what. seen_as: how much later a rank the model takes itself for than the loader does."""
    index = open_index(folder)
    cfg = facts.parse(index.config)
    whole = whole_blocks(facts.weights(cfg), replicate)
    slots = [
        dataclasses.replace(s, placement=Replicate()) if block_of(s.name) in whole else s for s in facts.weights(cfg)
    ]
    places, meetings = meshes(layout)
    places = [dataclasses.replace(place, rank=(place.rank + seen_as) % layout.tp) for place in places]
    with mock.patch.object(model, "weights", lambda _: slots):
        built = [
            model.Model(cfg, load(index, slots, facts=facts, rank=r, layout=layout).tensors, torch.float64, place)
            for r, place in enumerate(places)
        ]
    most = max(map(len, prompts[: layout.adp]))
    out, faults = {}, []

    def run(rank: int) -> None:
        try:
            group, at = divmod(rank, layout.attention)
            ids, state = prompts[group], states(cfg, at, layout.attention, whole)
            n = max(0, len(ids) - 1)
            found = [built[rank].forward(step(ids, 0, n, most - 1), state)]
            found.append(built[rank].forward(step(ids, n, n + 1, 1), state))
            out[rank] = torch.cat(found)
        except BaseException as e:  # so that no other rank waits for this one
            faults.append(e)
            for meeting in meetings:
                meeting.barrier.abort()

    with mock.patch.dict(
        vars(collectives), all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter
    ):
        threads = [threading.Thread(target=run, args=(r,)) for r in range(layout.tp)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for fault in faults:
        if not isinstance(fault, threading.BrokenBarrierError):
            raise fault
    return [out[r] for r in range(layout.tp)], meetings[0].met + meetings[layout.adp].met


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str], list[torch.Tensor]]:
    """Logits of each prompt on one rank, without padding."""
    known: dict[str, list[torch.Tensor]] = {}

    def of(name: str) -> list[torch.Tensor]:
        if name not in known:
            known[name] = [logits(checkpoint(name), Layout(), prompts=[p])[0][0] for p in PROMPTS if len(p)]
            known[name].append(known[name][0][:0])
        return known[name]

    return of


def near(found: list[torch.Tensor], groups: list[torch.Tensor], layout: Layout) -> bool:
    """Whether every rank has its group's logits."""
    each = [(x, groups[rank // layout.attention]) for rank, x in enumerate(found)]
    return all(x.shape == one.shape and bool((x - one).norm() <= 1e-9 * one.norm()) for x, one in each)


STEPS, LAYERS = 2, 4


@pytest.mark.parametrize("name", [MOE, DENSE])
def test_two_ranks_give_the_numbers_of_one(checkpoint, alone, name):  # B29, B32
    found, met = logits(checkpoint(name), Layout(2))
    assert near(found, alone(name), Layout(2))
    # The shared expert's sum and the routed experts' are one.
    assert met == {"sum": 2 * LAYERS * STEPS, "gather -1": STEPS}


SPREAD = [
    Layout(2, 2), Layout(4, 2, 2), Layout(4, 4, 2), Layout(4, 1, 2), Layout(2, 1, 2), Layout(2, 2, 2), Layout(4, 4, 4),
    Layout(4, 2, 4), Layout(8, 2, 4), Layout(8, 8, 4), Layout(3, 3, 3), Layout(6, 3, 3),
]  # fmt: skip


@pytest.mark.parametrize("layout", SPREAD, ids=lambda x: f"tp{x.tp}-ep{x.ep}-adp{x.adp}")
def test_experts_dealt_out_and_groups_with_own_requests_give_the_numbers_of_one_rank(checkpoint, alone, layout):
    # B8, B32, F29; 8 experts over 3: B34. Groups have prompts of other lengths, or none, and are padded.
    found, met = logits(checkpoint(MOE), layout)
    assert near(found, alone(MOE), layout)
    several, whole = layout.adp > 1, layout.attention == 1
    assert met["scatter"] == met["gather 0"] == several * LAYERS * STEPS
    assert met["sum"] == (not whole) * 2 * LAYERS * STEPS and met["gather -1"] == (not whole) * STEPS


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(4, 1, 2)])
def test_a_dense_model_needs_nothing_between_groups(checkpoint, alone, layout):  # B32
    found, met = logits(checkpoint(DENSE), layout)
    assert near(found, alone(DENSE), layout) and not met.keys() & {"scatter", "gather 0"}


@pytest.mark.parametrize("layout", [Layout(2), Layout(4, 4, 2)])
@pytest.mark.parametrize(
    ("replicate", "sums"),
    [
        (["layers.*.mlp.shared_expert"], 8), (["layers.*.mlp.experts"], 8),
        (["layers.*.mlp.experts", "layers.*.mlp.shared_expert"], 4), (["layers.*.linear_attn"], 5),
        (["layers.3.self_attn", "layers.1.linear_attn", "layers.2.mlp.*"], 5), (["*"], 0),
    ],
)  # fmt: skip
def test_whatever_stays_whole_gives_the_same_numbers(checkpoint, alone, replicate, sums, layout):  # B30
    found, met = logits(checkpoint(MOE), layout, replicate)
    assert near(found, alone(MOE), layout) and met["sum"] == STEPS * sums


def test_a_token_costs_nothing_on_ranks_without_its_experts(checkpoint):  # B8, F29
    real, rows = experts_kernel.linear.reference, []

    def counted(x, weight):
        rows.append(len(x))
        return real(x, weight)

    with mock.patch.object(experts_kernel, "linear", SimpleNamespace(reference=counted, wide=linear.wide)):
        logits(checkpoint(MOE), Layout(2, 2))
    assert sum(rows) == len(PROMPTS[0]) * LAYERS * 2 * 3  # 2 experts a token of 3 matrices


def wrong(fault: str, kind: str) -> Callable[..., Any]:
    real = getattr(collectives, kind)

    def call(x, *rest):
        if kind == "replicated" and rest[0].kind != "P":
            return real(x, *rest)
        return x if fault == "dropped" else real(real(x, *rest), *rest)

    return call


@pytest.mark.parametrize("fault", ["dropped", "doubled"])
@pytest.mark.parametrize("kind", ["replicated", "all_tokens", "own_tokens"])
def test_a_collective_that_is_dropped_or_doubled_shows_in_the_numbers(checkpoint, alone, fault, kind):  # B33
    layout = Layout(2) if kind == "replicated" else Layout(4, 4, 2)
    with mock.patch.object(model, kind, wrong(fault, kind)):
        try:
            found = logits(checkpoint(MOE), layout)[0]
        except RuntimeError:  # a tensor of another size
            return
    assert not near(found, alone(MOE), layout)


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(4, 2, 2)])
def test_experts_under_another_rank_s_numbers_show(checkpoint, alone, layout):  # B33: what types cannot see
    found, _ = logits(checkpoint(MOE), layout, seen_as=layout.tp // layout.ep)
    assert not near(found, alone(MOE), layout)
