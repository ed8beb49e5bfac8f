"""Ranks give one rank's numbers: the real forward on a real checkpoint in float64, each rank a thread of this process,
their collectives sums and concatenations in memory. Whatever blocks stay whole, and however many ranks there are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp4ward.checkpoint.index import open_index
from fp4ward.checkpoint.load import load
from fp4ward.facts import PagedKv
from fp4ward.facts import qwen3_5 as facts
from fp4ward.layers.step import KvCache, RecurrentState, SequenceStep, Step
from fp4ward.models import qwen3_5 as model
from fp4ward.parallel import collectives
from fp4ward.parallel.placement import Replicate
from fp4ward.pieces import block_of, whole_blocks

MOE, DENSE = "q35moe-w4a16-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
IDS = torch.tensor([364, 64, 351, 242, 7, 99, 500])


class Ranks:
    """Threads that meet at every collective; `all_reduce` and `all_gather` take the place of the real ones."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier, self.given = count, threading.Barrier(count, timeout=60), {}
        self.sums = self.gathers = 0

    def _meet(self, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        every = [self.given[r] for r in range(self.count)]
        self.barrier.wait()
        return every

    def all_reduce(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.sums += rank == 0
        return torch.stack(self._meet(x, rank)).sum(0)

    def all_gather(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.gathers += rank == 0
        return torch.cat(self._meet(x, rank), -1)


def logits(folder: Path, ranks: int, replicate: Sequence[str] = ()) -> tuple[list[torch.Tensor], Ranks]:
    """Of every token of a prompt and then of one more, as each rank has them."""
    index = open_index(folder)
    cfg = facts.parse(index.config)
    whole = whole_blocks(facts.weights(cfg), replicate)
    slots = [
        dataclasses.replace(s, placement=Replicate()) if block_of(s.name) in whole else s for s in facts.weights(cfg)
    ]
    meeting, out, faults = Ranks(ranks), {}, []
    with mock.patch.object(model, "weights", lambda _: slots):
        built = [
            model.Model(cfg, load(index, slots, facts=facts, rank=r, ranks=ranks).tensors, torch.float64, group=r)
            for r in range(ranks)
        ]

    def run(rank: int) -> None:
        try:
            state = []
            for i, (cut, full) in enumerate(
                zip(facts.state_spec(cfg, rank, ranks), facts.state_spec(cfg), strict=True)
            ):
                spec = full if {f"layers.{i}.self_attn", f"layers.{i}.linear_attn"} & whole else cut
                if isinstance(spec, PagedKv):
                    k, v = (torch.zeros(16, spec.heads, spec.head_dim, dtype=torch.float64) for _ in range(2))
                    state.append(KvCache(k, v))
                else:
                    conv, ssm = (torch.zeros(1, *shape, dtype=torch.float64) for shape in (spec.conv, spec.ssm))
                    state.append(RecurrentState(conv, ssm))
            n, found = len(IDS) - 1, []
            for first, last in ((0, n), (n, n + 1)):
                at, none = torch.arange(first, last), torch.empty(0, dtype=torch.long)
                one = (torch.tensor([0]), torch.tensor([0])) if last - first == 1 else (none, none)
                sequence = SequenceStep(0, last - first, first, 0, torch.arange(last))
                step = Step(IDS[first:last], at, at, torch.arange(last - first), (sequence,), *one)
                found.append(built[rank].forward(step, state))
            out[rank] = torch.cat(found)
        except BaseException as e:  # so that no other rank waits for this one
            faults.append(e)
            meeting.barrier.abort()

    with (
        mock.patch.object(collectives, "all_reduce", meeting.all_reduce),
        mock.patch.object(collectives, "all_gather", meeting.all_gather),
    ):
        threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for fault in faults:
        if not isinstance(fault, threading.BrokenBarrierError):
            raise fault
    return [out[r] for r in range(ranks)], meeting


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str], torch.Tensor]:
    known: dict[str, torch.Tensor] = {}

    def of(name: str) -> torch.Tensor:
        if name not in known:
            known[name] = logits(checkpoint(name), 1)[0][0]
        return known[name]

    return of


def near(found: list[torch.Tensor], one: torch.Tensor) -> bool:
    """Whether every rank has the logits of one."""
    return all(bool((x - one).norm() <= 1e-9 * one.norm()) for x in found)


@pytest.mark.parametrize("name", [MOE, DENSE])
def test_two_ranks_give_the_numbers_of_one(checkpoint, alone, name):  # B29, B32
    found, met = logits(checkpoint(name), 2)
    assert near(found, alone(name))
    steps, layers = 2, 4  # the shared expert's sum and the routed experts' are one
    assert (met.sums, met.gathers) == (2 * layers * steps, steps)


@pytest.mark.parametrize(
    ("replicate", "sums"),
    [
        (["layers.*.mlp.shared_expert"], 8), (["layers.*.mlp.experts"], 8),
        (["layers.*.mlp.experts", "layers.*.mlp.shared_expert"], 4), (["layers.*.linear_attn"], 5),
        (["layers.3.self_attn", "layers.1.linear_attn", "layers.2.mlp.*"], 5), (["*"], 0),
    ],
)  # fmt: skip
def test_whatever_stays_whole_gives_the_same_numbers(checkpoint, alone, replicate, sums):  # B30
    found, met = logits(checkpoint(MOE), 2, replicate)
    assert near(found, alone(MOE)) and met.sums == 2 * sums


@pytest.mark.parametrize("fault", ["dropped", "doubled"])
def test_a_collective_that_is_dropped_or_doubled_shows_in_the_numbers(checkpoint, alone, fault):  # B33
    real = collectives.replicated

    def wrong(x, kind, group):
        if kind.kind != "P":
            return real(x, kind, group)
        return x if fault == "dropped" else real(real(x, kind, group), kind, group)

    with mock.patch.object(model, "replicated", wrong):
        assert not near(logits(checkpoint(MOE), 2)[0], alone(MOE))
