"""experts.cu: its layout on a CPU, its kernels on a CPU too (emulator.py) and, with more and larger cases, on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.formats.formats import BF16, NVFP4
from fp4ward.formats.weight import Weight, part_shapes
from fp4ward.kernels import cuda_experts, cuda_norm, experts, nvrtc
from fp4ward.kernels.cuda_experts import Prepared, Routing, choose, expert_map, prepare, restore, route, run
from fp4ward.kernels.cuda_linear import H200, Gpu, gpu_of
from fp4ward.kernels.experts import Router
from fp4ward.kernels.norm import rms_norm
from tests.cases import MOE, NORM_ERROR, VARIANTS
from tests.kernels.emulator import DEVICE, GPU, RUN, machine

SMALL = Gpu(3, 227 << 10, True)  # what is emulated: few multiprocessors, so that a CTA has several tiles


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    monkeypatch.setattr(cuda_experts, "checked", True)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_experts, "gpu_here", lambda device: SMALL)
        cuda_experts._plan.cache_clear()
        cuda_norm._launch.cache_clear()
    with machine(request, monkeypatch):
        yield


def make(*shape: int) -> Weight:
    """Every code, and scales that give outputs of about 1."""
    parts = {}
    for name, (dtype, size) in part_shapes(NVFP4, shape).items():
        if dtype == torch.uint8:
            parts[name] = torch.randint(0, 256, size, dtype=torch.uint8)
        elif name == "block_scale":
            parts[name] = torch.randint(8, 96, size, dtype=torch.uint8).view(dtype)
        else:
            parts[name] = (torch.rand(size) + 0.5) / (12 * shape[-1] ** 0.5)
    return Weight(NVFP4, parts).to(DEVICE)


def block(e: int, i: int, h: int, gated: bool = True) -> list[Weight]:
    return [*(make(e, i, h) for _ in range(1 + gated)), make(e, h, i)]


def reference(x, weights, scale, ids):
    return (experts.reference if len(weights) == 3 else experts.relu2_reference)(x, *weights, scale, ids)


# --- layout -----------------------------------------------------------------------------------------------------------


def same(a: Weight, b: Weight) -> bool:
    bits = [[part.contiguous().view(torch.uint8) for part in w.parts.values()] for w in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


@pytest.mark.parametrize("gated", [True, False])
def test_restore_brings_prepared_experts_back(gated, monkeypatch):
    weights = block(5, 48, 80, gated)
    whole = prepare(*weights)
    monkeypatch.setattr(cuda_experts, "CHUNK", 1)
    made = prepare(*weights)
    assert all(same(a, b) for a, b in zip(restore(made), weights, strict=True))
    assert torch.equal(whole.up, made.up) and torch.equal(whole.down, made.down)


def test_a_wide_shared_expert_becomes_several_and_views_are_read():  # Nemotron-3-Nano's is twice as wide
    joined, down = make(3, 64, 80), make(3, 80, 64)
    weights = [joined.rows(16, 48), down.columns(32, 64)]
    shared = [make(64, 80), make(80, 64)]
    made = prepare(*weights, shared=shared)
    up, back = restore(made)
    assert made.shape == (5, 32, 80) and made.shared == 2
    assert same(up.expert(1), weights[0].expert(1)) and same(back.expert(2), weights[1].expert(2))
    assert same(up.expert(4), shared[0].rows(32, 64)) and same(back.expert(3), shared[1].columns(0, 32))


def test_prepare_states_what_it_reads():
    with pytest.raises(AssertionError, match="NVFP4 experts"):
        prepare(*block(2, 32, 32)[:2], block(2, 32, 32)[2].unpacked())


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [H200, gpu_of(80, 108), gpu_of(86, 84), gpu_of(120, 170)])
def test_every_launch_has_room_for_what_it_may_meet(gpu):
    for case in MOE:
        for tokens in (1, 2, 4, 16, 64, 200, 409):
            for up, down in VARIANTS.values():
                if (up or down) and gpu is not H200:
                    continue
                try:
                    plan = choose(tokens, case.top_k, (case.e, case.i, case.h), 0, case.gated, gpu, up, down)
                except AssertionError:
                    assert up or down  # a variant need not fit
                    continue
                assert plan.bound * plan.size >= tokens * case.top_k
                for launch in (plan.up, plan.down):
                    d, (listed, n, k, shift, window, *_) = launch.defines, launch.extra
                    assert launch.shared <= gpu.room // d["CTAS"] and launch.threads == 32 * d["WARPS"] <= 512
                    assert n % (16 * d["R"]) == 0 and plan.size <= 8 * d["NT"] and min(plan.size, tokens) <= 1 << shift
                    units = -(-plan.bound * (n // 16 // d["R"]) // launch.grid[0])  # of a CTA at most
                    met = plan.bound if d.get("OWN") else (units - 1) // (n // 16 // d["R"]) + 2
                    assert listed >= min(met, plan.bound)
                    x, pairs = -(-k // 128) * 256 << shift, tokens * case.top_k  # rings, sums, zeros, list, activations
                    need = d["WARPS"] * d["R"] * (d["DEPTH"] * 1152 + 2 * d["NT"] * 512) + 256
                    need += 2 * listed * (1 + plan.size) + d["BUFFERS"] * window * x
                    if d.get("OWN"):  # all pairs at once, their weights and rows
                        assert window << shift >= pairs
                        need += 4 * pairs + -(-n // 16 // d["R"] // launch.grid[0]) * d["R"] * pairs * 64
                    assert launch.shared >= need


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 1 << 16), st.integers(0, 1 << 16))
def test_divisions_by_their_inverse_are_exact(by, number):
    inverse = cuda_experts._inverse(by) % (1 << 32)
    assert (number * inverse >> 32 if inverse else number) == number // by


@pytest.mark.parametrize("sm", [80, 86, 90, 120])
def test_what_these_models_run_is_compiled_ahead(sm):
    known = set(cuda_experts.sources(sm))
    for case in MOE:
        for tokens in (1, 2, 3, 7, 16, 50, 64, 100, 161, 200, 256):
            plan = choose(tokens, case.top_k, (case.e, case.i, case.h), 0, case.gated, gpu_of(sm, 132), {}, {})
            for launch in (plan.up, plan.down):
                assert cuda_experts._source(launch.entry, launch.defines) in known, (case.name, tokens, launch)


def test_tuning_that_no_kernel_takes_is_refused():
    for up in ({"PAIRS": 12}, {"WARPS": 32}, {"WRAPS": 8}):
        with pytest.raises(AssertionError, match="gate_up"):
            choose(20, 8, (64, 512, 2048), 0, True, H200, up, {})


def test_wide_activations_fit_small_shared_memory_in_smaller_blocks():
    plan = choose(64, 8, (64, 2048, 7168), 0, True, gpu_of(120, 170), {}, {})
    assert plan.size < 8 and plan.up.defines["PAIRS"] == plan.size


# --- routing ----------------------------------------------------------------------------------------------------------


def slots_only(local: int, shared: int = 0) -> Prepared:
    none = torch.empty(0)
    return Prepared(none, none, none, none, True, shared, (local, 64, 128))


def listed(slots: torch.Tensor, local: int, size: int) -> list[tuple[int, list[int]]]:
    """The blocks that there must be, by expert."""
    pairs: dict[int, list[int]] = {}
    for p, e in enumerate(slots.flatten().tolist()):
        if 0 <= e < local:
            pairs.setdefault(e, []).append(p)
    return [(e, own[i : i + size]) for e, own in sorted(pairs.items()) for i in range(0, len(own), size)]


def blocks_of(found: Routing, size: int) -> list[tuple[int, list[int]]]:
    count, bound = int(found.list[0]), (found.list.numel() - 1) // (1 + size)
    assert count <= bound
    pairs = found.list[1 + bound :].view(bound, size)[:count].tolist()
    for row in pairs:
        assert row == sorted(row, key=lambda p: p < 0)  # the dead come last
    return [(e, [p for p in row if p >= 0]) for e, row in zip(found.list[1 : 1 + count].tolist(), pairs, strict=True)]


def check_route(logits, top_k, local, shared=0, gate=None, **options):
    made = slots_only(local, shared)
    tokens, k = logits.shape[0], top_k + shared
    size = choose(tokens, k, made.shape, shared, True, cuda_experts.gpu_here(torch.device(DEVICE)), {}, {}).size
    got = route(logits, top_k, made, torch.bfloat16, shared_gate_T=gate, **options)
    weights, ids = experts.route(logits, top_k, **options)
    if shared:
        always = torch.arange(local - shared, local, device=DEVICE).repeat(tokens, 1)
        one = torch.ones(tokens, device=DEVICE) if gate is None else gate.float().sigmoid()
        ids, weights = torch.cat([ids, always], 1), torch.cat([weights, one[:, None].repeat(1, shared)], 1)
    assert torch.equal(got.slots.long(), ids)
    torch.testing.assert_close(got.weights, weights.float(), rtol=1e-5, atol=1e-9)
    assert sorted(blocks_of(got, size)) == listed(got.slots, local, size)


@pytest.fixture
def no_kernels(monkeypatch):
    """The choice without loading the experts' kernels, where only routing runs."""

    def plan(tokens, k, shape, shared, gated, half, device, up, down):
        return choose(tokens, k, shape, shared, gated, cuda_experts.gpu_here(device), {}, {}), None, None

    monkeypatch.setattr(cuda_experts, "_plan", plan)


def test_the_reference_router_by_hand():
    logits = torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    bias = torch.randn(12, dtype=torch.float64, device=DEVICE) / 5
    for sigmoid in (False, True):
        weights, ids = experts.route(
            logits, 3, sigmoid=sigmoid, bias_E=bias, groups=4, top_groups=2, normalize=sigmoid, factor=2.5
        )
        for t in range(5):
            score = logits[t].sigmoid() if sigmoid else logits[t].softmax(0)
            choice = (score + bias).tolist()
            worth = [sum(sorted(choice[g * 3 : g * 3 + 3])[1:]) for g in range(4)]
            kept = sorted(range(4), key=lambda g: -worth[g])[:2]
            best = sorted((e for e in range(12) if e // 3 in kept), key=lambda e: -choice[e])[:3]
            total = sum(score[e].item() for e in best) if sigmoid else 1.0
            assert ids[t].tolist() == best
            assert weights[t].tolist() == pytest.approx([2.5 * score[e].item() / total for e in best], rel=1e-12)


@RUN
@pytest.mark.usefixtures("no_kernels")
def test_route_equals_its_reference():
    logits = torch.randn(40, 121, device=DEVICE) * 2
    check_route(logits[:1, :120], 8, 120)
    check_route(logits[:, :120], 6, 122, shared=2, sigmoid=True, bias_E=torch.randn(120, device=DEVICE), factor=2.5)
    check_route(logits[:9, :120].bfloat16(), 22, 121, shared=1, gate=logits[:9, 120].bfloat16())
    check_route(logits[:5, :120].half(), 1, 120)
    check_route(logits[:7, :60], 4, 60, groups=6, top_groups=2, normalize=False)
    check_route(logits[:3, :64], 4, 64, groups=8, top_groups=3, sigmoid=True, bias_E=torch.randn(64, device=DEVICE))


@RUN
@pytest.mark.usefixtures("no_kernels")
def test_equal_logits_go_to_the_lower_expert():
    logits = torch.zeros(3, 100, device=DEVICE)
    logits[1, 50:], logits[2] = 1, -0.0
    logits[2, ::2] = 0.0
    check_route(logits, 7, 100)


@RUN
@pytest.mark.usefixtures("no_kernels")
def test_copies_take_turns_and_experts_elsewhere_cost_nothing():  # B7, B8
    copies = expert_map([[0, 1, -1], [2], [-1], []], DEVICE)
    assert copies.tolist() == [[0, 1, -1], [2, 2, 2], [-1, -1, -1], [-1, -1, -1]]
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0], device=DEVICE).repeat(7, 1)
    check_route(logits, 3, 3, copies_EC=copies)
    check_route(logits[:1], 3, 4, shared=1, copies_EC=copies)
    check_route(logits[:, [2, 3, 0, 1]], 2, 3, copies_EC=expert_map([[-1], [-1], [0], [1]], DEVICE))


@RUN
@settings(deadline=None, derandomize=True, max_examples=25 if DEVICE == "cpu" else 300)
@given(st.data())
def test_the_list_holds_every_pair_once(data):
    local, k = data.draw(st.integers(1, 1024)), data.draw(st.integers(1, 22))
    tokens, size = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    spread = data.draw(st.sampled_from([1, 3, local + 5]))  # all on one expert, on few, or on any; some beyond
    seed = data.draw(st.integers(0, 1 << 20))
    ids = torch.randint(-2, spread, (tokens, k), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    pairs = tokens * k
    bound = (pairs + (size - 1) * min(pairs, local)) // size
    slots = torch.empty(tokens, k, dtype=torch.int32, device=DEVICE)
    got = Routing(ids, slots, cuda_experts._new_list(size, bound, torch.device(DEVICE)))
    nvrtc.kernel(cuda_experts._route_source("listing", 1), torch.device(DEVICE))(
        (1, 1, 1), cuda_experts.ROUTE_WARPS * 32, cuda_experts._list_room(pairs, local), ids, got.slots, got.list,
        pairs, 1, local, size, bound,
    )  # fmt: skip
    assert torch.equal(got.slots.long(), torch.where((ids >= 0) & (ids < local), ids, -1))
    assert blocks_of(got, size) == listed(ids, local, size)


# --- experts ----------------------------------------------------------------------------------------------------------


def check(x, weights, scale, ids, up=None, down=None):
    made = prepare(*weights)
    live = (ids >= 0) & (ids < made.shape[0])
    y = cuda_experts.experts(x, made, scale.masked_fill(~live, torch.nan), ids, up, down)
    want = reference(x.double(), weights, scale.double(), ids.long())
    assert y.dtype == x.dtype and y.shape == x.shape and torch.isfinite(y).all()
    assert (y.double() - want).norm() <= NORM_ERROR * want.norm()
    assert torch.equal(cuda_experts.experts(x, made, scale, ids, up, down), y)  # bit for bit
    return y


def draw(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, hidden, device=DEVICE).to(dtype)


def routed(tokens: int, count: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 2.5 * torch.rand(tokens, k, device=DEVICE), torch.rand(tokens, count, device=DEVICE).topk(k, -1)[1]


@RUN
def test_gated_experts_equal_float64_and_gate_is_not_up():
    weights, route = block(6, 48, 176), routed(9, 6, 2)
    route[1][0, 0], route[1][1, 1], route[1][2] = -1, 6, torch.tensor([2**40, 1])  # F29
    x = draw(9, 176)
    y = check(x, weights, *route)
    turned = cuda_experts.experts(x, prepare(weights[1], weights[0], weights[2]), *route)
    assert (turned.double() - y.double()).norm() > 0.1 * y.double().norm()
    for t in (0, 4):  # a token alone, which is another plan, is nearly the same
        alone = cuda_experts.experts(x[t : t + 1], prepare(*weights), *(r[t : t + 1] for r in route))
        assert (alone.double() - y[t : t + 1].double()).norm() <= NORM_ERROR * y[t].double().norm()


@RUN
def test_experts_without_a_gate_in_large_blocks():
    check(draw(21, 80, torch.float16), block(3, 144, 80, False), *routed(21, 3, 2), {"PAIRS": 16})


@RUN
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize(("warps", "window"), [(4, 1), (16, 1), (3, 2)])
def test_two_tiles_at_once_and_windows_of_few_blocks(buffers, warps, window):
    weights, route = block(6, 176, 96), routed(11, 6, 3)
    route[1][0, 0], route[1][1] = -1, -1
    tuning = {"WARPS": warps, "WINDOW": window, "BUFFERS": buffers}
    check(draw(11, 96), weights, *route, {"R": 2, "DEPTH": 1, **tuning}, {"DEPTH": 3, **tuning})


@RUN
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_blocks_that_own_rows_add_them_up(tokens, r):
    weights, route = block(6, 48, 288), routed(tokens, 6, 3)
    route[1][0, 0] = -1
    if tokens > 1:
        route[1][tokens // 2] = -1
    check(draw(tokens, 288), weights, *route, {}, {"OWN": 1, "WARPS": 5, "R": r})


@RUN
@pytest.mark.parametrize("own", [0, 1])
def test_nobody_routed_here_gives_zeros(own):
    weights, nowhere = block(6, 48, 96), torch.full((3, 2), -1, device=DEVICE)
    made, up = prepare(*weights), {"WARPS": 4}
    assert not cuda_experts.experts(draw(3, 96), made, routed(3, 6, 2)[0], nowhere, up, {"OWN": own}).any()


@RUN
@pytest.mark.parametrize("size", [1, 2, 4])
def test_smaller_blocks_of_which_a_multiprocessor_lists_its_own(size, monkeypatch):
    gpu = Gpu(7, 99 << 10, False)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_experts, "gpu_here", lambda device: gpu)
    tokens, k = (65, 8) if size == 1 else (20, 3)
    plan = choose(tokens, k, (70, 16, 48), 0, True, gpu, {"PAIRS": size}, {})
    assert (plan.up.extra[0] < plan.bound) == (size == 1)
    check(draw(tokens, 48), block(70, 16, 48), *routed(tokens, 70, k), {"PAIRS": size})


@RUN
def test_all_tokens_on_one_expert_and_none_at_all():
    weights = block(6, 48, 176)
    for tokens, up in ((19, {}), (140, {"WINDOW": 1})):  # activations are replaced from block to block
        one = torch.full((tokens, 1), 5, device=DEVICE).int()
        check(draw(tokens, 176), weights, torch.rand(tokens, 1, device=DEVICE), one, {"PAIRS": 8, **up}, up)
    assert cuda_experts.experts(draw(0, 176), prepare(*weights), *routed(0, 6, 2)).shape == (0, 176)
    nowhere = torch.full((3, 2), -1, device=DEVICE)
    assert not cuda_experts.experts(draw(3, 176), prepare(*weights), routed(3, 6, 2)[0], nowhere).any()


def test_a_token_with_an_expert_twice_is_refused():
    ids = torch.tensor([[1, 2], [3, 3]], device=DEVICE)
    with pytest.raises(AssertionError, match="an expert twice"):
        cuda_experts.experts(draw(2, 80), slots_only(4), torch.rand(2, 2, device=DEVICE), ids)


@RUN
def test_shared_experts_run_in_the_same_launches():
    weights, shared = block(4, 32, 80), [make(32, 80), make(32, 80), make(80, 32)]
    made, x, logits = prepare(*weights, shared=shared), draw(3, 80), torch.randn(3, 5, device=DEVICE)
    got = run(x, made, route(logits[:, :4], 2, made, x.dtype, factor=2.5, shared_gate_T=logits[:, 4]))
    scale, ids = experts.route(logits[:, :4].double(), 2, factor=2.5)
    alone = [Weight(NVFP4, {name: part[None] for name, part in w.parts.items()}) for w in shared]
    want = reference(x.double(), weights, scale, ids)
    want += reference(x.double(), alone, logits[:, 4:].double().sigmoid(), torch.zeros_like(ids[:, :1]))
    assert (got.double() - want).norm() <= NORM_ERROR * want.norm()


def steady(tokens: int, hidden: int) -> torch.Tensor:
    """The same on every machine, for what decides a choice."""
    return torch.randn(tokens, hidden).bfloat16().to(DEVICE)


def whole(e: int, i: int, h: int, wide: int = 1):
    """What experts.block takes after x, its router's logits far from ties; and the same prepared."""
    weights, shared = block(e, i, h), [make(wide * i, h), make(wide * i, h), make(h, wide * i)]
    gate, shared_gate = (Weight(BF16, {"data": steady(n, h) * (8 / h) ** 0.5}) for n in (e, 1))
    norm = (1 + steady(1, h)[0] / 8).float()
    return (norm, weights, gate, shared_gate, shared), cuda_experts.prepare_block(*weights, gate, shared_gate, *shared)


def block_of_parts(x, parts, made, router):
    """experts.block in float64 without x, but for what it has in bf16: the norm, and logits of many tokens."""
    norm, weights, gate, _, shared = parts
    n = rms_norm(x, norm, 1e-6)
    logits = n.double() @ made.gates.double().T if len(x) <= cuda_norm.MAX_TOKENS else n @ made.gates.T
    logits, own = logits[:, : gate.shape[0]], logits[:, gate.shape[0], None]
    routed = reference(n.double(), weights, *router(logits.double()))
    alone = [Weight(NVFP4, {name: part[None] for name, part in w.parts.items()}) for w in shared]
    return routed + reference(n.double(), alone, own.double().sigmoid(), torch.zeros_like(own, dtype=torch.long))


@RUN
def test_a_block_of_many_tokens_has_their_logits_in_their_type():
    parts, made = whole(6, 32, 80)
    x, router = steady(17, 80), Router(3)
    want = block_of_parts(x, parts, made, router)
    for weight in (parts[0], parts[0].bfloat16()):  # ours; torch's, of the same values
        got = cuda_experts.block(x, made, weight, 1e-6, router).double()
        assert (got - x.double() - want).norm() <= 1.5 * NORM_ERROR * want.norm()


@RUN
def test_a_block_runs_from_norm_to_residual(monkeypatch):
    parts, made = whole(6, 32, 80, wide=2)
    x, router = steady(7, 80), Router(3, factor=2.5)
    want = block_of_parts(x, parts, made, router)
    whole_want = experts.block(x.double(), parts[0].double(), 1e-6, router, *parts[1:])
    for most in (4096, 11):  # in one round, and two tokens a round
        monkeypatch.setattr(cuda_experts, "MAX_PAIRS", most)
        got = cuda_experts.block(x, made, parts[0], 1e-6, router).double()
        assert (got - x.double() - want).norm() <= 1.5 * NORM_ERROR * want.norm()  # the sum with x is rounded too
        assert (got - whole_want).norm() <= 0.02 * want.norm()
        assert torch.equal(cuda_experts.block(x, made, parts[0], 1e-6, router).double(), got)
    monkeypatch.setattr(cuda_experts, "MAX_PAIRS", 4096)
    assert cuda_experts.block(x[:0], made, parts[0], 1e-6, router).shape == (0, 80)
    here = Router(3, copies_EC=expert_map([[0], [-1], [1], [-1], [-1], [-1]], DEVICE))  # B8: of another rank
    some = [Weight(NVFP4, {k: p[::2][:2] for k, p in w.parts.items()}) for w in parts[1]]
    logits = steady(7, 6)
    got = cuda_experts.routed(x, prepare(*some), logits, here)
    scale, ids = here(logits)
    want = reference(x.double(), some, scale.double(), ids)
    assert set(ids.unique().tolist()) == {-1, 0, 1} and (got.double() - want).norm() <= NORM_ERROR * want.norm()


def check_graph(chain, renew):
    """A captured chain gives what the chain gives, whatever its inputs hold by then."""
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(4):
        renew()
        graph.replay()
        assert torch.equal(y, chain())


@GPU
@pytest.mark.parametrize("tokens", [1, 17, 130])
def test_a_graph_holds_a_chain_of_blocks(tokens):
    parts, made = whole(16, 512, 2048)
    x, router = draw(tokens, 2048), Router(4)
    want = block_of_parts(x, parts, made, router)
    got = cuda_experts.block(x, made, parts[0], 1e-6, router)
    assert (got.double() - x.double() - want).norm() <= 1.5 * NORM_ERROR * want.norm()

    def chain():
        y = x
        for _ in range(3):
            y = cuda_experts.block(y, made, parts[0], 1e-6, router)
        return y

    check_graph(chain, lambda: x.copy_(draw(tokens, 2048)))


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 17, 64, 130])
@pytest.mark.parametrize("shape", [(16, 512, 2048, 8), (16, 1856, 2688, 6), (1024, 16, 64, 22), (12, 1024, 4096, 10)])
def test_experts_equal_float64(shape, tokens, dtype):
    e, i, h, k = shape
    check(draw(tokens, h, dtype), block(e, i, h, i != 1856), *routed(tokens, e, k))


@GPU
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_every_variant_equals_float64(variant, tokens):
    if variant == "down owns rows" and tokens > 16:
        pytest.skip("so much shared memory there is not")
    check(draw(tokens, 2048), block(16, 512, 2048), *routed(tokens, 16, 8), *VARIANTS[variant])


@GPU
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_graph_holds_a_chain_whose_routing_changes(tokens):  # each launch may start before the one ahead of it ends
    made, x, logits = prepare(*block(16, 512, 2048)), draw(tokens, 2048), torch.randn(tokens, 16, device=DEVICE)

    def chain():
        y = x
        for _ in range(3):
            y = run(y, made, route(logits, 4, made, x.dtype)) * 0.1
        return y

    check_graph(chain, lambda: (x.copy_(draw(tokens, 2048)), logits.copy_(torch.randn_like(logits))))
