"""Routing and experts for few tokens, NVFP4 weights, exact, in 3 or 4 launches: route.cu, experts.cu, their choice.

`routed` is routing and experts, `block` all from the norm to the residual, `experts` what others chose.

Legend: T tokens, E experts on this rank, I expert width, H hidden, k experts a token, P = T k pairs, S of a block.

Layout. cuda_linear's records, of all experts one after the other: up [E, 2 I / 16, H / 128, 1152], where a tile's first
8 rows are gate's and the others the same 8 of up (ungated: [E, I / 16, ...], up's rows as they are), and down
[E, H / 16, I / 128, 1152]. Shared experts are the last; one that is s times as wide is s experts.

Bytes. 0.5625 * 3 I H (ungated 2 I H) once for each expert that is met; then through L2 4 P I for h and, but for a
single token, 8 P H for what `combine` adds up.

Loses from about 40 pairs an expert on: each further block of S pairs decodes the expert's weights again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.formats.formats import NVFP4
from fp4ward.formats.weight import Weight, concat
from fp4ward.kernels import cuda_linear, cuda_norm, norm, nvrtc
from fp4ward.kernels.cuda_linear import COLUMNS, DTYPES, H200, RECORD, ROWS, Gpu, Launch, gpu_here, gpu_of
from fp4ward.kernels.experts import Router
from fp4ward.kernels.nvrtc import Source

FILE = "experts.cu"
MAX_PAIRS = 4096  # of one round of launches; more go in several
CHUNK = 1 << 28  # weights of a matrix that prepare lays out at once: 600 MiB of scratch for gate and up
ROUTE_WARPS, RUNS = 16, 16
TUNED = {"gate_up": {"PAIRS", "WARPS", "CTAS", "R", "DEPTH", "BUFFERS", "WINDOW", "PDL"}}
TUNED["down"] = TUNED["gate_up"] - {"PAIRS"} | {"OWN"}
LOGITS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, eq=False)
class Prepared:
    """Experts as the kernels read them; see above. up_scale f32 [E, rows], down_scale f32 [E, H]. E with the shared."""

    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    gated: bool
    shared: int
    shape: tuple[int, int, int]  # E, I, H


class Routing(NamedTuple):
    """weights f32 [T, k], slots int32 [T, k] (negative: of no expert here), and the list of blocks of them."""

    weights: Tensor
    slots: Tensor
    list: Tensor


# --- layout -----------------------------------------------------------------------------------------------------------


def prepare(*weights: Weight, shared: Sequence[Weight] = ()) -> Prepared:
    """gate, up [E, I, H] and down [E, H, I], or up and down of experts without a gate; shared: the same [s I, H] and
    [H, s I] of a shared expert. All NVFP4, I and H multiples of 16; AssertionError otherwise.

    They are left as they are. Scratch: under 1 GiB, some experts at a time.
    """
    *rows, down = weights
    count, width, hidden = rows[0].shape
    assert len(weights) in (2, 3) and all(w.shape == (count, width, hidden) for w in rows)
    assert down.shape == (count, hidden, width) and width % 16 == 0 and hidden % 16 == 0
    assert all(w.format.name == "nvfp4" for w in (*weights, *shared)), "the CUDA kernels read NVFP4 experts"
    more = 0
    if shared:
        more = shared[0].shape[0] // width
        assert len(shared) == len(weights) and shared[-1].shape == (hidden, more * width)
        assert all(w.shape == (more * width, hidden) for w in shared[:-1])

    def part(w: Weight, start: int) -> Weight:  # some experts from `start` on, or all shared ones
        if start < count:
            step = max(1, CHUNK // (hidden * width))
            return Weight(NVFP4, {name: p[start : start + step] for name, p in w.parts.items()})
        own = shared[next(i for i, one in enumerate(weights) if one is w)]
        cuts = [(i * width, (i + 1) * width) for i in range(more)]
        found = [own.columns(*cut) if w is down else own.rows(*cut) for cut in cuts]
        return Weight(NVFP4, {name: _stacked([f.parts[name] for f in found], 0) for name in NVFP4.components})

    def laid(matrices: Sequence[Weight], n: int, k: int) -> tuple[Tensor, Tensor]:
        tiles, steps = n // ROWS, -(-k // COLUMNS)
        records = torch.empty(count + more, tiles, steps, RECORD["nvfp4"], dtype=torch.uint8, device=down.device)
        scale = torch.empty(count + more, n, device=down.device)
        start = 0
        while start < count + more:
            cut = [part(w, start).parts for w in matrices]
            stop = start + cut[0]["packed"].shape[0]
            flat = {name: _woven([c[name] for c in cut]) for name in NVFP4.components}
            made = cuda_linear.prepare(Weight(NVFP4, flat))
            records[start:stop] = made.records.view(stop - start, tiles, steps, -1)
            scale[start:stop] = flat["global_scale"].view(stop - start, n)
            start = stop
        return records, scale

    return Prepared(
        *laid(rows, len(rows) * width, hidden), *laid([down], hidden, width), len(rows) == 2, more,
        (count + more, width, hidden),
    )  # fmt: skip


def restore(made: Prepared) -> list[Weight]:
    """The weights again, shared experts behind the others, but for what cuda_linear.restore cannot bring back."""
    count, width, hidden = made.shape
    found = []
    for records, scale, n, k in ((made.up, made.up_scale, -1, hidden), (made.down, made.down_scale, hidden, width)):
        flat = cuda_linear.Prepared(NVFP4, (scale.numel(), k), records.flatten(0, 1), scale.flatten())
        parts = cuda_linear.restore(flat).parts
        if n < 0 and made.gated:
            both = {name: p.view(count, width // 8, 2, 8, *p.shape[1:]) for name, p in parts.items()}
            halves = [{name: p[:, :, i].flatten(1, 2) for name, p in both.items()} for i in (0, 1)]
        else:
            halves = [{name: p.view(count, -1, *p.shape[1:]) for name, p in parts.items()}]
        found += [Weight(NVFP4, half) for half in halves]
    return found


def _woven(parts: Sequence[Tensor]) -> Tensor:
    """[E, N, ...] of one matrix, or of two 8 rows in turn -> [E N, ...]."""
    if len(parts) == 1:
        return parts[0].flatten(0, 1)
    return _stacked([p.unflatten(1, (-1, 8)) for p in parts], 2).flatten(0, 3)


def _stacked(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.stack, of FP8 too."""
    as_bytes = [p.view(torch.uint8) if p.element_size() == 1 else p for p in parts]
    return torch.stack(as_bytes, dim).view(parts[0].dtype)


# --- choice -----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """size: pairs of a block, at most `bound` blocks."""

    size: int
    bound: int
    up: Launch
    down: Launch


def _ways(entry: str, tokens: int, records: float, nt: int) -> list[tuple[int, int, int, int]]:
    """Warps of a CTA, CTAs on a multiprocessor, tiles at once, records in flight a warp: the best first, then what
    needs less memory. records: that a multiprocessor goes through. docs/LOG.md: Which way wins."""
    if entry == "gate_up":
        best = (16, 1, 1, 2) if records < 128 else (16, 1, 2, 2)
    elif tokens == 1:
        best = (8, 2, 1, 2) if records < 100 else (16, 1, 2, 1)
    else:
        best = (8, 2, 2, 1) if records < 600 and nt == 1 else (16, 1, 2, 2)
    return [best, (16, 1, 2, 1), (16, 1, 1, 2), (8, 1, 1, 2), (8, 1, 1, 1)]


def _inverse(by: int) -> int:
    """What experts.cu's `divided` takes for a divisor, as an int32."""
    found = 0 if by == 1 else -(-(1 << 32) // by)
    return found - (found >> 31 << 32)


def _launch(
    entry: str, tokens: int, top_k: int, n: int, k: int, size: int, bound: int, gpu: Gpu, way: Mapping[str, int]
) -> Launch | None:  # fmt: skip
    """gate_up or down of experts' weights [n, k]. None where x does not fit or n has no whole units."""
    warps, ctas, r, depth, own = way["WARPS"], way["CTAS"], way["R"], way["DEPTH"], way["OWN"]
    if n % (ROWS * r):
        return None
    units, steps, pairs, nt = n // (ROWS * r), -(-k // COLUMNS), tokens * top_k, -(-size // 8)
    shift = (min(size, tokens) - 1).bit_length()
    grid, room = gpu.sms * ctas, gpu.room // ctas - 1024 * (ctas > 1)
    met = min(bound, -(-bound * units // grid // units) + 1)  # blocks of a CTA at most
    listed = bound if own or bound * (1 + size) <= 1024 else met
    fixed = warps * r * (depth * RECORD["nvfp4"] + 2 * nt * 512) + 256 + -(-2 * listed * (1 + size) // 32) * 32
    if own:  # x of all pairs, for which `window` makes room, and its units' rows
        met = -(-pairs >> shift)
        fixed += -(-pairs // 4) * 16 + (units // grid + 1) * r * pairs * 64
    fit = (room - fixed) // (x := steps * 256 << shift)
    buffers = way.get("BUFFERS", 1 if fit >= met or fit < 2 else 2)
    window = way.get("WINDOW", min(met, fit // buffers))
    if window < 1 or window * buffers > fit or (own and window < met):
        return None
    shared = fixed + buffers * window * x
    if warps < 16:  # else registers see to it
        shared = cuda_linear.alone(gpu, grid, 1, shared)
    records = (units // grid + 1) * bound if own else window * units  # units, of a window
    if max(bound * units * max(units, grid), records * steps * steps, pairs * top_k) >= 1 << 32:
        return None  # more than `divided` divides exactly
    inverses = (_inverse(by) for by in (grid, units, steps, top_k if entry == "gate_up" else 1))
    defines = {"PAIRS": size, "NT": nt, "R": r, "DEPTH": depth, "BUFFERS": buffers, "WARPS": warps, "CTAS": ctas}
    return Launch(defines, entry, (grid, 1, 1), warps * 32, shared, extra=(listed, n, k, shift, window, *inverses))


def choose(
    tokens: int, top_k: int, shape: tuple[int, int, int], shared: int, gated: bool, gpu: Gpu,
    up: Mapping[str, int], down: Mapping[str, int],
) -> Plan:  # fmt: skip
    """top_k: with the shared experts. up, down: of TUNED, override the choice."""
    for entry, tuning in (("gate_up", up), ("down", down)):
        assert TUNED[entry].issuperset(tuning), f"{entry} takes {', '.join(sorted(TUNED[entry]))}, not {dict(tuning)}"
        sane = tuning.get("PAIRS", 8) in (1, 2, 4, 8, 16) and tuning.get("WARPS", 16) <= 16
        assert sane, f"{entry} with {dict(tuning)}: PAIRS is 1, 2, 4, 8 or 16, WARPS at most 16"
    count, width, hidden = shape
    pairs, routed = tokens * top_k, max(1, count - shared)
    hit = routed * (1 - (1 - min(1.0, (top_k - shared) / routed)) ** tokens)
    preferred = 16 if tokens * (top_k - shared) > 5 * routed else 8
    sizes = [up["PAIRS"]] if "PAIRS" in up else [size for size in (16, 8, 4, 2, 1) if size <= preferred]
    for size in sizes:
        bound = (pairs + (size - 1) * min(pairs, count)) // size
        blocks = min(bound, max(hit, tokens * (top_k - shared) / size) + shared * -(-tokens // size))
        made = []
        for entry, tuning, n, k in (
            ("gate_up", up, (2 if gated else 1) * width, hidden), ("down", down, hidden, width),
        ):  # fmt: skip
            records = blocks * (n // ROWS) * -(-k // COLUMNS) / gpu.sms
            owns = (1, 0) if entry == "down" and tokens == 1 else (0,)
            ways = [(own, *way) for own in owns for way in _ways(entry, tokens, records, -(-size // 8))]
            for own, warps, ctas, r, depth in ways:
                way = {"OWN": own, "WARPS": warps, "CTAS": ctas, "R": r, "DEPTH": depth, **tuning}
                if (launch := _launch(entry, tokens, top_k, n, k, size, bound, gpu, way)) is not None:
                    more = {"GATED": int(gated), "GATE_UP": 1} if entry == "gate_up" else {"OWN": way["OWN"], "DOWN": 1}
                    made.append(launch._replace(defines=launch.defines | more))
                    break
        if len(made) == 2:
            return Plan(size, bound, *made)
    raise AssertionError(f"experts {shape}, {pairs} pairs: {dict(up)} and {dict(down)} do not fit {gpu}")


def _source(entry: str, defines: Mapping[str, int], half: bool = False) -> Source:
    return Source(FILE, tuple({"HALF": int(half), "PDL": 1, **defines}.items()), entry)


def _route_source(entry: str, experts: int) -> Source:
    each = next(e for e in (4, 8, 16, 32) if experts <= 32 * e) if entry == "route" else 1
    return Source("route.cu", (("HALF", 0), ("PDL", 1), ("EACH", each), ("WARPS", ROUTE_WARPS)), entry)


def sources(sm: int) -> list[Source]:
    """What `choose` takes for most experts up to 7168 wide, up to 256 tokens and GPUs of this SM."""
    gpu, found = gpu_of(sm, H200.sms), [_route_source("listing", 1)]
    found += [_route_source("route", e) for e in (128, 256, 512, 1024)]
    found += [_source("combine", {"COMBINE": 1}, half) for half in (False, True)]
    widths, hiddens = [16 << i for i in range(9)] + [384, 1856], (2048, 2688, 4096, 7168)
    for tokens in (1, 2, 4, 16, 64, 128, 192, 256):
        for e, k, gated in ((256, 8, True), (512, 10, True), (128, 6, False)):
            for shape in ((e, width, hidden) for width in widths for hidden in hiddens):
                plan = choose(tokens, k, shape, 0, gated, gpu, {}, {})
                for launch in (plan.up, plan.down):
                    found += [_source(launch.entry, launch.defines, half) for half in (False, True)]
    return list(dict.fromkeys(found))


@functools.cache
def _plan(
    tokens: int, top_k: int, shape: tuple[int, int, int], shared: int, gated: bool, half: bool, device: torch.device,
    up: Any, down: Any,
) -> tuple[Plan, nvrtc.Kernel, nvrtc.Kernel]:  # fmt: skip
    plan = choose(tokens, top_k, shape, shared, gated, gpu_here(device), dict(up), dict(down))
    first, second = (nvrtc.kernel(_source(m.entry, m.defines, half), device) for m in (plan.up, plan.down))
    return plan, first, second


def _planned(
    w: Prepared, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device,
    up: Mapping[str, int] | None, down: Mapping[str, int] | None,
) -> tuple[Plan, nvrtc.Kernel, nvrtc.Kernel]:  # fmt: skip
    options = tuple(sorted((up or {}).items())), tuple(sorted((down or {}).items()))
    return _plan(tokens, top_k, w.shape, w.shared, w.gated, dtype == torch.float16, device, *options)


# --- the launches -----------------------------------------------------------------------------------------------------


def expert_map(copies: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Of each expert the slots of its copies, -1 for one on another rank -> int32 [E, C]; every rank gives them in the
    same order. Token t takes copy t % (their number); an expert without any is left out."""
    width = math.lcm(*(max(1, len(c)) for c in copies))
    return torch.tensor([(list(c) or [-1]) * (width // max(1, len(c))) for c in copies], dtype=torch.int32).to(device)


@functools.cache
def _ticket(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _list_room(pairs: int, local: int) -> int:
    """Bytes of shared memory for a list."""
    return 4 * (min(RUNS, -(-pairs // 32) or 1) * local + local + ROUTE_WARPS)


def _new_list(size: int, bound: int, device: torch.device) -> Tensor:
    return torch.empty(1 + bound * (1 + size), dtype=torch.int32, device=device)


def route(
    logits_TE: Tensor, top_k: int, prepared: Prepared, dtype: torch.dtype, *, sigmoid: bool = False,
    bias_E: Tensor | None = None, groups: int = 1, top_groups: int = 1, normalize: bool = True, factor: float = 1.0,
    copies_EC: Tensor | None = None, shared_gate_T: Tensor | None = None, pdl: bool = True,
    up: Mapping[str, int] | None = None, down: Mapping[str, int] | None = None,
) -> Routing:  # fmt: skip
    """experts.route's choice for `prepared`'s slots, and its list for `run` with activations of `dtype`, in one launch.

    logits: f32, bf16 or f16, a row contiguous. Shared experts come last among a token's, with weight
    sigmoid(shared_gate_T) (of the logits' type, any stride) or 1. At most MAX_PAIRS pairs. Of one stream of a device at
    a time: the launches share a counter.
    """
    (tokens, experts), local = logits_TE.shape, prepared.shape[0]
    k = top_k + prepared.shared
    assert logits_TE.dtype in LOGITS and logits_TE.stride(1) == 1 and experts <= 1024 and k <= 32
    assert experts % groups == 0 and groups <= 32 and 1 <= top_k <= experts // groups * top_groups
    assert copies_EC is not None or experts == local - prepared.shared, "some experts have no slot and there is no map"
    assert copies_EC is None or (copies_EC.dtype == torch.int32 and copies_EC.is_contiguous())
    assert bias_E is None or (bias_E.dtype == torch.float32 and bias_E.is_contiguous())
    assert shared_gate_T is None or shared_gate_T.dtype == logits_TE.dtype
    assert tokens * k <= MAX_PAIRS, f"{tokens * k} pairs, at most {MAX_PAIRS}"
    device = logits_TE.device
    weights = torch.empty(tokens, k, device=device)
    slots = torch.empty(tokens, k, dtype=torch.int32, device=device)
    if tokens == 0:
        return Routing(weights, slots, slots.flatten())
    plan, *_ = _planned(prepared, tokens, k, dtype, device, up, down)
    blocks = _new_list(plan.size, plan.bound, device)
    source = _route_source("route", experts)
    each = dict(source.defines)["EACH"]
    room = max(ROUTE_WARPS * 32 * 4 * int(each), _list_room(tokens * k, local)) + ROUTE_WARPS * 128
    nvrtc.kernel(source, device)(
        (-(-tokens // ROUTE_WARPS), 1, 1), ROUTE_WARPS * 32, room,
        logits_TE, bias_E, copies_EC, shared_gate_T, slots, weights, blocks, _ticket(device),
        tokens, experts, logits_TE.stride(0), LOGITS[logits_TE.dtype], top_k, int(sigmoid), groups, top_groups,
        int(normalize), float(factor), 1 if copies_EC is None else copies_EC.shape[1], local, prepared.shared,
        0 if shared_gate_T is None else shared_gate_T.stride(0), plan.size, plan.bound, pdl=pdl,
    )  # fmt: skip
    return Routing(weights, slots, blocks)


def run(
    x_TH: Tensor, w: Prepared, routing: Routing, up: Mapping[str, int] | None = None,
    down: Mapping[str, int] | None = None, residual_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H] bf16 or f16 -> [T, H], residual added in f32, in 2 or 3 launches; up, down: as at `choose`, the same
    that made the list."""
    (tokens, hidden), k, width = x_TH.shape, routing.slots.shape[1], w.shape[1]
    assert x_TH.dtype in DTYPES and hidden == w.shape[2] and routing.slots.shape[0] == tokens
    y = torch.empty(tokens, hidden, dtype=x_TH.dtype, device=x_TH.device)
    if tokens == 0 or k == 0:
        return y.zero_() if residual_TH is None else y.copy_(residual_TH)
    assert residual_TH is None or (residual_TH.shape == x_TH.shape and residual_TH.dtype == x_TH.dtype)
    (x, pitch), residual = cuda_linear.rows(x_TH), None if residual_TH is None else residual_TH.contiguous()
    if residual is not None and residual.data_ptr() % 8:
        residual = residual.clone()
    plan, first, second = _planned(w, tokens, k, x.dtype, x.device, up, down)
    h = torch.empty(tokens * k, width, dtype=x.dtype, device=x.device)
    a, b = plan.up, plan.down
    rows = None if b.defines["OWN"] else torch.empty(tokens * k, hidden, device=x.device)
    first(
        a.grid, a.threads, a.shared, w.up, w.up_scale, x, routing.list, h, plan.bound, *a.extra[:3], pitch,
        *a.extra[3:], pdl=(up or {}).get("PDL", 1) > 0,
    )  # fmt: skip
    second(
        b.grid, b.threads, b.shared, w.down, w.down_scale, h, routing.list, routing.slots, routing.weights, residual,
        rows, y, tokens, k, plan.bound, *b.extra[:3], width, *b.extra[3:], pdl=(down or {}).get("PDL", 1) > 0,
    )  # fmt: skip
    if rows is None:
        return y
    nvrtc.kernel(_source("combine", {"COMBINE": 1}, x.dtype == torch.float16), x.device)(
        (-(-tokens * hidden // 512), 1, 1), 128, 0, rows, routing.slots, routing.weights, residual, y,
        tokens, hidden, k, pdl=True,
    )  # fmt: skip
    return y


def routed(
    x_TH: Tensor, w: Prepared, logits_TE: Tensor, router: Router, shared_gate_T: Tensor | None = None,
    residual_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The experts that `router` chooses by logits (f32, bf16 or f16), and w's shared ones: x [T, H] -> [T, H].

    3 or 4 launches for up to MAX_PAIRS choices, no host synchronisation; equal inputs give equal bits, but a token's
    last bits may depend on the others' routing (experts.cu). Graph-capturable with any routing, but for the first call
    of a kernel.
    """
    step, done = MAX_PAIRS // (router.top_k + w.shared), []
    for at in range(0, max(1, len(x_TH)), step):
        few = slice(at, at + step)
        gate, residual = (t if t is None else t[few] for t in (shared_gate_T, residual_TH))
        choice = route(logits_TE[few], prepared=w, dtype=x_TH.dtype, shared_gate_T=gate, **vars(router))
        done.append(run(x_TH[few], w, choice, residual_TH=residual))
    return done[0] if len(done) == 1 else torch.cat(done)


@dataclass(frozen=True, eq=False)
class Block:
    """Experts with their shared ones, and gates [>= E + 1, H]: a row an expert, the shared expert's, zeros."""

    experts: Prepared
    gates: Tensor


def prepare_block(*weights: Weight) -> Block:
    """From experts.block's gate, up, down, router's gate, shared_gate and the shared gate, up, down."""
    gates = concat(weights[3:5]).parts["data"]
    gates = functional.pad(gates, (0, 0, 0, -len(gates) % 8))  # rows of logits stay aligned
    return Block(prepare(*weights[:3], shared=weights[5:]), gates)


def block(x_TH: Tensor, w: Block, norm_H: Tensor, eps: float, router: Router) -> Tensor:
    """experts.block for all experts on one rank: norm, one product with all gates, and `routed`, which adds x. Norm and
    product are one launch for few tokens, with logits in f32. norm_H: in f32, or torch's norm is taken."""
    (tokens, hidden), count, ours = x_TH.shape, w.experts.shape[0] - w.experts.shared, norm_H.dtype == torch.float32
    few = tokens <= cuda_norm.MAX_TOKENS and hidden <= cuda_norm.MAX_HIDDEN
    if ours and few and w.gates.dtype == x_TH.dtype:
        n, logits = cuda_norm.rms_norm_gates(x_TH, norm_H, eps, w.gates)
    else:
        n = (cuda_norm if ours else norm).rms_norm(x_TH, norm_H, eps)
        logits = functional.linear(n, w.gates)
    return routed(n, w.experts, logits[:, :count], router, logits[:, count], x_TH)


checked = False  # tests: look for an expert that a token has twice; the host waits for the device


def experts(
    x_TH: Tensor, w: Prepared, weights_Tk: Tensor, ids_Tk: Tensor, up: Mapping[str, int] | None = None,
    down: Mapping[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """What kernels.experts' references compute, of `prepare`d weights: x [T, H] bf16 or f16; weights of a float type;
    ids int32 or int64 of experts here (others contribute nothing), no two of a token's the same.

    In 3 or 4 launches for up to MAX_PAIRS choices. Equal inputs give equal bits, but a token's last bits may depend on
    the others' routing (experts.cu). Graph-capturable, but for the first call of a kernel.
    """
    tokens, k = ids_Tk.shape
    assert weights_Tk.shape == ids_Tk.shape and tokens == x_TH.shape[0] and 1 <= k <= MAX_PAIRS
    assert ids_Tk.dtype in (torch.int32, torch.int64), f"expert ids must be integers, not {ids_Tk.dtype}"
    if checked:
        ids = torch.where((ids_Tk >= 0) & (ids_Tk < w.shape[0]), ids_Tk, -1 - torch.arange(k, device=ids_Tk.device))
        assert not (ids.sort(-1)[0].diff(dim=-1) == 0).any(), "a token has an expert twice"
    if tokens * k > MAX_PAIRS:
        step = MAX_PAIRS // k
        cuts = [slice(at, at + step) for at in range(0, tokens, step)]
        return torch.cat([experts(x_TH[c], w, weights_Tk[c], ids_Tk[c], up, down) for c in cuts])
    ids, weights, device = ids_Tk.contiguous(), weights_Tk.float().contiguous(), x_TH.device
    slots = torch.empty(tokens, k, dtype=torch.int32, device=device)
    if tokens == 0:
        return run(x_TH, w, Routing(weights, slots, slots))
    plan, *_ = _planned(w, tokens, k, x_TH.dtype, device, up, down)
    blocks = _new_list(plan.size, plan.bound, device)
    nvrtc.kernel(_route_source("listing", 1), device)(
        (1, 1, 1), ROUTE_WARPS * 32, _list_room(tokens * k, w.shape[0]), ids, slots, blocks,
        tokens * k, int(ids.dtype == torch.int64), w.shape[0], plan.size, plan.bound, pdl=True,
    )  # fmt: skip
    return run(x_TH, w, Routing(weights, slots, blocks), up, down)
