"""gated_delta.cu against its formulas in float64: emulated on a CPU in small sizes, on a GPU in those of models."""

from __future__ import annotations

import pytest
import torch

from fp4ward.kernels import cuda_gated_delta, gated_delta, norm
from fp4ward.kernels.cuda_gated_delta import cut, mix
from fp4ward.kernels.cuda_linear import H200, gpu_of
from tests.kernels.emulator import DEVICE, GPU, RUN, machine

EPS = 1e-6
MODELS = ((16, 32), (16, 48), (16, 64), (2, 4), (2, 8))  # 35B, 27B, 397B, and parts of them under tensor parallelism


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_gated_delta, "gpu_here", lambda device: H200)
    cuda_gated_delta._plan.cache_clear()
    with machine(request, monkeypatch):
        yield
    cuda_gated_delta._plan.cache_clear()


class Case:
    """Sequences of `counts` tokens with `slots`, and `extra` rows of none. What no sequence may touch holds NaN.
    joined: inputs are slices of one tensor, no better aligned than they must be."""

    def __init__(self, counts, slots=None, extra=0, nk=2, nv=4, d=32, dtype=torch.bfloat16, joined=False, known=None):
        self.counts, self.nk, self.nv, self.d, self.dtype = counts, nk, nv, d, dtype
        self.slots = list(range(len(counts))) if slots is None else slots
        known = known or max([*self.slots, 0]) + 2
        channels, self.tokens = (2 * nk + nv) * d, sum(counts) + extra
        self.conv, self.minus_a = self.rand(channels, 4), -self.rand(nv).exp()
        self.dt_bias, self.norm = self.rand(nv), 1 + self.rand(d) / 8
        self.starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=DEVICE)
        self.slots_B = torch.tensor(self.slots, dtype=torch.int32, device=DEVICE)
        self.past, self.ssm = self.rand(known, channels, 3).to(dtype), self.rand(known, nv, d, d)
        dead = [s for s in range(known) if not any(s == t and n for t, n in zip(self.slots, counts, strict=True))]
        self.past[dead], self.ssm[dead] = torch.nan, torch.nan
        self.joined = joined
        self.renew()

    def rand(self, *shape):
        return torch.randn(*shape, device=DEVICE)

    def renew(self):
        widths = [(2 * self.nk + self.nv) * self.d, self.nv * self.d, self.nv, self.nv]
        if self.joined:
            ahead = (2, 2, 1, 0)  # of qkv, z, a, b: even, then a multiple of 4, then odd
            whole = self.rand(self.tokens, sum(widths) + 11 + -(sum(widths) + 11) % 4).to(self.dtype)
            self.inputs, at = [], 0
            for n, gap in zip(widths, ahead, strict=True):
                self.inputs.append(whole[:, at + gap : at + gap + n])
                at += gap + n
        else:
            self.inputs = [self.rand(self.tokens, n).to(self.dtype) for n in widths]

    def run(self, way=(8, 4), past=None, ssm=None):
        """-> o, and both states after it; the case keeps its own."""
        past, ssm = self.past.clone() if past is None else past, self.ssm.clone() if ssm is None else ssm
        numbers = (self.conv, self.minus_a, self.dt_bias, self.norm)
        o = mix(*self.inputs, *numbers, EPS, self.d, self.starts, self.slots_B, past, ssm, way)
        return o, past, ssm

    def reference(self):
        """The same in float64 but for what is rounded on the way: the convolution's output."""
        (qkv, z, a, b), (nk, nv, d), wide = self.inputs, (self.nk, self.nv, self.d), torch.float64
        o = torch.zeros(self.tokens, nv * d, dtype=wide, device=DEVICE)
        past, ssm = self.past.clone(), self.ssm.to(wide)
        for i, slot in enumerate(self.slots):
            rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
            if slot < 0 or rows.start == rows.stop:
                continue
            u, past[slot] = gated_delta.causal_conv(qkv[rows], self.conv.to(wide), past[slot])
            q, k, v = (x.unflatten(1, (-1, d)) for x in u.to(wide).split([nk * d, nk * d, nv * d], dim=1))
            q, k = gated_delta.unit(q) * d**-0.5, gated_delta.unit(k)
            g = self.minus_a * torch.nn.functional.softplus(a[rows].to(wide) + self.dt_bias)
            for t in range(len(u)):
                heads = (x[t].repeat_interleave(nv // nk, 0)[None] for x in (q, k))
                step = (*heads, v[t][None], g[t][None], b[rows][t][None].to(wide).sigmoid(), ssm[slot][None])
                out, state = gated_delta.step(*step)
                ssm[slot] = state[0]
                gate = z[rows][t].to(wide).view(nv, d)
                o[rows.start + t] = norm.gated_rms_norm(out[0], gate, self.norm.to(wide), EPS).flatten()
        return o, past, ssm


def bits(*tensors):
    return [x.contiguous().view(torch.uint8) for x in tensors]


def check(case, way=(8, 4)):
    got, want = case.run(way), case.reference()
    (o, past, ssm), live = got, sorted(s for s, n in zip(case.slots, case.counts, strict=True) if s >= 0 and n)
    ulp = 2.0**-8 if case.dtype == torch.bfloat16 else 2.0**-11
    assert o.dtype == case.dtype and torch.isfinite(o).all()
    # Both are rounded, and the convolution's output too: the other way where f32 and f64 lie around the middle
    rounded = want[0].to(case.dtype).double()
    assert (o.double() - rounded).norm() <= 0.5 * ulp * rounded.norm()
    assert not o[want[0].abs().sum(1) == 0].any()
    assert torch.equal(past.nan_to_num(7e3), want[1].nan_to_num(7e3))
    assert (ssm[live].double() - want[2][live]).norm() <= 0.3 * ulp * want[2][live].norm()
    for now, before in ((past, case.past), (ssm, case.ssm)):
        rest = [s for s in range(len(now)) if s not in live]
        assert torch.equal(*bits(now[rest], before[rest]))
    for one, other in zip(bits(*got), bits(*case.run(way)), strict=True):
        assert torch.equal(one, other)
    return got


CASES = {
    "one token": {"counts": [1]},
    "several sequences, slots anywhere": {"counts": [1, 1, 1], "slots": [4, 0, 2]},
    "a run beside single tokens": {"counts": [1, 5, 1], "slots": [2, 1, 0]},
    "a sequence without rows": {"counts": [1, 0, 2, 0], "slots": [0, 1, 3, -1]},
    "padding": {"counts": [1, 2, 1], "slots": [1, -1, 0], "extra": 2},
    "only padding": {"counts": [1, 1], "slots": [-1, -1], "extra": 1},
    "slices of a joined projection": {"counts": [2, 1], "joined": True},
    "f16": {"counts": [2, 1], "dtype": torch.float16, "joined": True},
    "more tokens than a chunk has": {"counts": [19, 1], "slots": [0, 1]},
    "chunks of one or two tokens": {"counts": [4, 0, 0, 0, 0], "slots": [1, 0, 2, 3, 4]},
}


@RUN
@pytest.mark.parametrize("way", [(8, 4), (2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_formulas(name, way):
    check(Case(**CASES[name]), way)


@RUN
@pytest.mark.parametrize(("nk", "nv", "d"), [(1, 1, 16), (1, 3, 128), (1, 2, 64), (1, 8, 16), (2, 10, 16), (1, 5, 32)])
def test_sizes_of_heads_and_how_many_share_a_key(nk, nv, d):
    check(Case([1, 2], nk=nk, nv=nv, d=d), (8, 4))


@RUN
def test_without_clusters(monkeypatch):  # SM 80, 86, 89: the 99 KiB of most of them suffice
    monkeypatch.setattr(cuda_gated_delta, "gpu_here", lambda device: gpu_of(89, 8))
    check(Case([3, 1], nk=1, nv=2, d=64))


@RUN
@pytest.mark.parametrize("way", [(8, 4), (1, 4)], ids=str)
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(way):
    together = Case([1, 5, 1, 2], slots=[1, 0, 4, 2])
    o, past, ssm = together.run(way)
    for i, slot in enumerate(together.slots):
        alone = Case(together.counts[i : i + 1], [slot], known=len(past))
        rows = slice(int(together.starts[i]), int(together.starts[i + 1]))
        for name in ("conv", "minus_a", "dt_bias", "norm", "past", "ssm"):
            setattr(alone, name, getattr(together, name))
        alone.inputs = [x[rows] for x in together.inputs]
        found = alone.run(way)
        assert torch.equal(*bits(found[0], o[rows]))
        assert torch.equal(*bits(found[1][slot], past[slot])) and torch.equal(*bits(found[2][slot], ssm[slot]))


@RUN
def test_steps_of_one_token_go_where_a_run_goes():
    run = Case([4])
    o, past, ssm = run.run()
    step, moved = Case([1]), (run.past.clone(), run.ssm.clone())
    for name in ("conv", "minus_a", "dt_bias", "norm"):
        setattr(step, name, getattr(run, name))
    for t in range(4):
        step.inputs = [x[t : t + 1] for x in run.inputs]
        assert torch.equal(*bits(step.run((8, 4), *moved)[0], o[t : t + 1]))
    assert torch.equal(*bits(moved[0][0], past[0])) and torch.equal(*bits(moved[1][0], ssm[0]))


def test_nothing_gives_nothing():
    case = Case([], extra=2)
    assert not case.run()[0].any() and Case([]).run()[0].shape == (0, 128)


def test_what_is_no_size_of_ours_is_refused():
    with pytest.raises(AssertionError, match="heads of 48"):
        cut(2, 48, 48, H200)


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_model_is_cut_into_few_threads_and_compiled_ahead(sm):
    gpu, known = gpu_of(sm, 132), set(cuda_gated_delta.sources(sm))
    for nk, nv in MODELS:
        c = cut(nv // nk, 128, 128, gpu)
        assert c.threads <= 512 and nv // nk % c.heads == 0 and c.heads * 128 // 16 % c.cluster == 0
        assert c.cluster == (8 if sm >= 90 else 1) and cuda_gated_delta._source(c, 128, 128, False) in known


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[1], [1] * 4, [1] * 64, [1, 5, 0, 1], [64], [3, 40, 1, 20]], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_sizes_of_models(model, counts, dtype):
    check(Case(counts, nk=model[0], nv=model[1], d=128, dtype=dtype, joined=True))


@GPU
@pytest.mark.parametrize("way", [(8, 8), (4, 4), (4, 8), (2, 8), (1, 8)], ids=str)
@pytest.mark.parametrize("model", MODELS[:3], ids=str)
def test_other_ways_to_cut(model, way):
    check(Case([1, 9, 2], nk=model[0], nv=model[1], d=128), way)


@GPU
@pytest.mark.parametrize("counts", [[1], [1] * 16, [2, 1, 5]], ids=str)
def test_a_graph_holds_a_chain(counts):
    """Each launch may begin before the one ahead of it ends; slots and states are what they are when it is replayed."""
    case = Case(counts, nk=16, nv=32, d=128, known=40)
    case.past, case.ssm = case.rand(*case.past.shape).to(case.dtype), case.rand(*case.ssm.shape)
    captured, direct = [(case.past.clone(), case.ssm.clone()) for _ in range(2)]
    before = [x.clone() for x in captured]

    def chain(past, ssm):
        return torch.stack([case.run((8, 4), past, ssm)[0] for _ in range(5)])

    chain(*captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = chain(*captured)
    for _ in range(4):
        for x in case.inputs:
            x.copy_(torch.randn_like(x))
        case.slots_B.copy_(torch.randperm(40)[: len(counts)])
        for now, then in zip((*captured, *direct), before * 2, strict=True):
            now.copy_(then)
        graph.replay()
        want = chain(*direct)
        assert all(torch.equal(*bits(*pair)) for pair in ((o, want), *zip(captured, direct, strict=True)))
