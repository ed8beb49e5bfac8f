"""What sequences keep between steps: pages of K and V, and recurrent slots.

The tensors are laid out from a facts module's `state_spec`, so memory is known before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4ward.errors import UserError
from fp4ward.facts import PagedKv, StateSpec
from fp4ward.kernels.linear import wide
from fp4ward.layers.step import KvCache, RecurrentState
from fp4ward.memory import page_bytes, slot_bytes
from fp4ward.runtime.scheduler import Work

KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}


@dataclass
class State:
    """One entry a layer, and the geometry they share. pages: int32 [slots, P], the numbers of each slot's pages."""

    layers: list[KvCache | RecurrentState]
    page_size: int
    pages: Tensor
    known: list[int]  # of each slot, how many of them are written

    def place(self, work: Sequence[Work]) -> None:
        """Write the page numbers that are new, in one copy."""
        new: list[tuple[int, int, int]] = []
        for w in work:
            slot, pages = w.request.slot, w.request.pages
            assert slot is not None
            first = 0 if w.request.computed == 0 else self.known[slot]
            new += [(slot, at, pages[at]) for at in range(first, len(pages))]
            self.known[slot] = len(pages)
        if new and self.pages.numel():
            slots, at, numbers = torch.tensor(new).T.to(self.pages.device)
            self.pages[slots, at] = numbers.int()

    @staticmethod
    def allocate(
        spec: Sequence[StateSpec],
        *,
        pages: int,
        page_size: int,
        slots: int,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
        kv_scales: Mapping[int, tuple[float, float]],
        length: int,
    ) -> State:
        """Caches are left unwritten (only stored positions are ever read); recurrent slots are cleared on use. length:
        of the longest sequence."""
        layers: list[KvCache | RecurrentState] = []
        try:
            for i, s in enumerate(spec):
                if isinstance(s, PagedKv):
                    shape = (pages * page_size, s.heads, s.head_dim)
                    k, v = (torch.empty(shape, dtype=KV_DTYPES[kv_dtype], device=device) for _ in range(2))
                    layers.append(KvCache(k, v, *kv_scales.get(i, (1.0, 1.0))))
                else:
                    conv = torch.empty((slots, *s.conv), dtype=dtype, device=device)
                    ssm = torch.empty((slots, *s.ssm), dtype=wide(dtype), device=device)
                    layers.append(RecurrentState(conv, ssm))
        except (RuntimeError, MemoryError) as e:
            need = pages * page_bytes(spec, page_size, kv_dtype) + slots * slot_bytes(
                spec, str(dtype).removeprefix("torch.")
            )
            raise UserError(
                f"the cache needs {need / 2**30:.2f} GiB, which {device} does not have; "
                f"lower --max-num-seqs, --max-model-len or --kv-cache-memory-bytes"
            ) from e
        columns = 1 << (-(-length // page_size) - 1).bit_length() if any(isinstance(s, PagedKv) for s in spec) else 0
        table = torch.zeros(slots, columns, dtype=torch.int32, device=device)
        return State(layers, page_size, table, [0] * slots)

    def clear_slot(self, slot: int) -> None:
        """A new sequence starts from zero state."""
        for layer in self.layers:
            if isinstance(layer, RecurrentState):
                layer.conv[slot] = 0
                layer.ssm[slot] = 0
