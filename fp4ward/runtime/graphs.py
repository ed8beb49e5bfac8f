"""Decoding as CUDA graphs: a step's kernels, captured once for each number of sequences and replayed without Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4ward.layers.step import KvCache, RecurrentState, Step, Tables
from fp4ward.runtime.batch import width
from fp4ward.runtime.scheduler import Work
from fp4ward.runtime.state import State

KEPT = 128  # graphs; the one that was not used for the longest time makes room


class Graphs:
    """Steps of one token of each of up to `most` sequences. One of a size (sequences, and columns of the page table)
    that has not been met runs as any step does, which loads its kernels; the next of that size is captured.

    forward: of the model, with kernels only that look at no tensor's values on the host.
    """

    def __init__(
        self, forward: Callable[[Step, Sequence[KvCache | RecurrentState]], Tensor], state: State, most: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.forward, self.state, self.most = forward, state, most
        self.graphs: OrderedDict[tuple[int, int], torch.cuda.CUDAGraph | None] = OrderedDict()
        # What a step says, written before every replay: token, position, place in the cache, slot
        self.said = torch.zeros(4, most, dtype=torch.long, device=device)
        self.count = torch.arange(most + 1, device=device)
        self.logits = torch.empty(0, device=device)  # of all graphs
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def takes(self, work: Sequence[Work]) -> bool:
        """Whether every sequence decodes: its last known token is all that it computes."""
        return len(work) <= self.most and all(w.count == 1 == w.request.num_tokens - w.request.computed for w in work)

    def run(self, work: Sequence[Work], plainly: Callable[[], Tensor]) -> Tensor:
        """Logits [B, V], which hold until the next step. plainly: the step without a graph."""
        size = len(work), width(work)
        if size not in self.graphs:
            self.graphs[size] = None
            if len(self.graphs) > KEPT:
                self.graphs.popitem(last=False)
            logits = plainly()
            if self.logits.shape[-1] != logits.shape[1]:
                self.logits = logits.new_empty(self.most, logits.shape[1])
            return logits
        self.graphs.move_to_end(size)
        self.said[:, : len(work)] = torch.tensor([self._says(w) for w in work]).T.to(self.said.device)
        graph = self.graphs[size]
        if graph is None:
            graph = self.graphs[size] = self._capture(*size)
        graph.replay()
        return self.logits[: len(work)]

    def _says(self, w: Work) -> tuple[int, int, int, int]:
        r, at, page = w.request, w.request.computed, self.state.page_size
        assert r.slot is not None
        return r.tokens(at, at + 1)[0], at, r.pages[at // page] * page + at % page, r.slot

    def _capture(self, sequences: int, columns: int) -> torch.cuda.CUDAGraph:
        ids, positions, cache_at, slots = self.said[:, :sequences]
        rows, none, graph = self.count[:sequences], self.count[:0], torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                own = slots.int()
                starts, pages = self.count[: sequences + 1].int(), self.state.pages[:, :columns]
                tables = Tables(starts, own, own, pages, self.state.page_size)
                step = Step(ids, positions, cache_at, rows, (), none, none, tables)
                self.logits[:sequences] = self.forward(step, self.state.layers)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph
