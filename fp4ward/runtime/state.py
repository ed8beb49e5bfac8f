"""What sequences keep between steps: pages of K and V, and recurrent slots.

The tensors are laid out from a facts module's `state_spec`, so memory is known before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp4ward.errors import UserError
from fp4ward.facts import PagedKv, StateSpec
from fp4ward.kernels.linear import wide
from fp4ward.layers.step import KvCache, RecurrentState
from fp4ward.memory import page_bytes, slot_bytes

KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}


@dataclass
class State:
    """One entry a layer, and the geometry they share."""

    layers: list[KvCache | RecurrentState]
    page_size: int

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
    ) -> State:
        """Caches are left unwritten (only stored positions are ever read); recurrent slots are cleared on use."""
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
        return State(layers, page_size)

    def clear_slot(self, slot: int) -> None:
        """A new sequence starts from zero state."""
        for layer in self.layers:
            if isinstance(layer, RecurrentState):
                layer.conv[slot] = 0
                layer.ssm[slot] = 0
