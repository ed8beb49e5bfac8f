"""The engine runs the plan: each operation's kernel for each number of tokens is the one that the plan names."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward import LLM, SamplingParams, hardware, memory, pieces, plan, plan_text
from fp4ward.cli import main
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.facts.qwen3_5 import MOE_BLOCK
from fp4ward.formats.formats import NVFP4
from fp4ward.formats.weight import Weight, allocate
from fp4ward.kernels import cuda_experts, experts, linear, nvrtc, specs
from fp4ward.kernels.cuda_linear import Gpu
from fp4ward.kernels.specs import SPECS, KernelSpec, LayerDesc
from fp4ward.layers.op import ANY, Op, Way
from fp4ward.runtime import runner
from tests.build import Checkpoint
from tests.kernels import emulator
from tests.unit.test_plan import FIXTURES, WITHOUT_CUDA
from tests.unit.test_plan_properties import subjects

Calls = list[tuple[str, int, tuple[Any, ...]]]
# Rows that do not exist, so that regimes differ and weights want other layouts, some of them several.
FAST: dict[str, Any] = {"memory": 1.0, "cuts": (specs.Cut(1.0),), "launches": (0.1, 0)}
MORE = (
    KernelSpec("few", "linear", ("nvfp4", "bf16"), "linear", specs.TESTED, tokens=(1, 16), prepare="pack_few", **FAST),
    KernelSpec("one", "experts", ("nvfp4", "fp8_block"), "experts", specs.TESTED, tokens=(1, 1), **FAST),
    KernelSpec("many", "experts", ("nvfp4", "f16"), "experts", specs.TESTED, tokens=(17, 1 << 20), prepare="p", **FAST),
)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call of a bound kernel: its row's name, its tokens, the weights that it got. Kernels still run."""
    calls: Calls = []
    real = runner.code

    def code(spec: KernelSpec, name: str) -> Callable[..., torch.Tensor]:
        def spy(x: torch.Tensor, *args: Any) -> torch.Tensor:
            calls.append((spec.name, x.shape[0], args))
            return real(spec, name)(x, *args)

        return spy

    monkeypatch.setattr(runner, "code", code)
    return calls


@given(subjects(), st.sampled_from(hardware.ROWS), st.sampled_from(["auto", "float16"]), st.integers(1, 300))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_op_gets_the_planned_kernel_and_its_layout(
    s: pieces.Subject, hw: hardware.Hardware, dtype: str, most: int
) -> None:
    config = EngineConfig(model="x", dtype=dtype, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=most)
    try:
        made = plan.make(s, hw, plan.Options(config), specs=(*MORE, *SPECS))
    except UserError:
        return
    ops, prepared, calls = {}, defaultdict(list), []
    with pytest.MonkeyPatch.context() as patch:

        def code(spec: KernelSpec, name: str) -> Callable[..., Any]:
            if name in (spec.prepare, "prepare_block"):
                return lambda *raw: (prepared[raw].append(spec.name), f"{spec.name} of {raw}")[1]
            return lambda x, *weights: calls.append((spec.name, weights))

        patch.setattr(runner, "code", code)
        for p in sorted(made.layers, key=lambda p: p.layer.op == "experts"):
            path, is_experts = p.layer.path, p.layer.op == "experts"
            inside = tuple(ops[q] for q in (path.replace("experts", x) for x in MOE_BLOCK) if is_experts and q in ops)
            if p.layer.op in ("linear", "experts"):
                ops[path] = Op(None, *(f"{path} {i}" for i in range(1 + 2 * is_experts)), inside=inside)
        raw = {path: op.weights for path, op in ops.items()}
        whole = {path: sum((o.weights for o in op.inside), op.weights) for path, op in ops.items()}
        runner.bind(ops, made)
    for p in made.layers:
        if p.layer.path not in ops:
            assert not p.layer.formats or p.layer.op == "embedding"
            continue
        op, mine = ops[p.layer.path], raw[p.layer.path]
        if any(pick.inside for pick in p.choice.picks):
            if p.layer.op == "experts":  # one layout, of all that is inside
                assert [w for w in op.ways if w.function == "block"] and prepared[whole[p.layer.path]]
            else:
                kernels = [pick.kernel.name for pick in p.choice.picks if not pick.inside]
                assert len(op.ways) == len(list(itertools.groupby(kernels)))
            continue
        for regime, pick in zip(made.regimes, p.choice.picks, strict=True):
            own = (f"{pick.kernel.name} of {mine}",) if pick.kernel.prepare else mine
            for tokens in {regime.least, regime.tokens} | ({65 + most} if regime is made.regimes[-1] else set()):
                calls.clear()
                op(torch.empty(tokens, 1))
                assert calls == [(pick.kernel.name, own)], (p.layer.path, tokens)
        layouts = {pick.kernel.name for pick in p.choice.picks if pick.kernel.prepare}
        assert sorted(prepared[mine]) == sorted(layouts)  # once each
        assert op.weights == (mine if len(layouts) < len({k.kernel.name for k in p.choice.picks}) else ())
        assert p.copies(tied=False) == len(layouts) + bool(op.weights) - 1


def test_a_group_binds_by_its_own_rows(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:  # F25
    """16 tokens of 4 groups that attend to their own requests are 4 rows in each, but 16 in the experts of all."""
    four = KernelSpec("four", "linear", specs.SPECS[0].formats, "linear", specs.TESTED, tokens=(1, 4), **FAST)
    wide = dataclasses.replace(four, name="wide", tokens=(17, 512))  # a prompt of 2048 tokens is all in one group
    options = plan.Options(EngineConfig(model="x"), plan.Layout(4, 4, 4))
    made = plan.make(pieces.read(checkpoint(FIXTURES[0])), hardware.parse("H200"), options, specs=(four, wide, *SPECS))
    ops = {p.layer.path: Op(None, "w") for p in made.layers if p.layer.op in ("linear", "experts")}
    monkeypatch.setattr(runner, "code", lambda spec, name: str if name == spec.prepare else spec.name)
    runner.bind(ops, made)
    assert [way[:2] for way in ops["lm_head"].ways] == [(4, "four"), (ANY, "torch_linear")]
    rows = {p.layer.op: [pick.rows for pick in p.choice.picks] for p in made.layers}
    assert (rows["linear"], rows["experts"]) == ([1, 4, 16, 512], [1, 16, 64, 2048])


@pytest.mark.parametrize("name", FIXTURES)
def test_the_engine_runs_the_plan(name: str, checkpoint: Callable[[str], Path], spied: Calls) -> None:
    llm = LLM(str(checkpoint(name)), device="cpu", show_progress=False)
    by_path = {p.layer.path: p for p in llm.plan.layers}
    ops = llm.engine.runner.model.ops
    assert set(ops) == {path for path, p in by_path.items() if p.layer.op != "embedding"}
    assert all(bool(op.weights) == bool(by_path[path].layer.formats) for path, op in ops.items())
    owner = {id(w): path for path, op in ops.items() for w in op.weights}
    llm.generate([[1, 2, 3, 4, 5]] * 3, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert {tokens for _, tokens, _ in spied} == {15, 3}
    for kernel, tokens, args in spied:
        picks = by_path[owner[id(args[0])]].choice.picks
        regime = next(i for i, r in enumerate(llm.plan.regimes) if tokens <= r.tokens)
        assert picks[regime].kernel.name == kernel


def test_every_row_has_its_code() -> None:
    for spec in SPECS:
        more = ("routed", "block", "prepare_block") if spec.routes else ()
        for name in (
            (spec.function, spec.prepare, *more)
            if spec.op in ("linear", "experts") or spec.status != specs.REFERENCE
            else ()
        ):
            assert not name or callable(runner.code(spec, name)), spec.name


def test_w4a4_shares_all_but_the_scales_of_the_stored_weight() -> None:
    (row,) = (s for s in SPECS if s.name == "torch_w4a4_linear")
    w = allocate(NVFP4, (256, 512), torch.device("cpu"))
    made = runner.code(row, row.prepare)(w)
    assert made.packed.data_ptr() == w.parts["packed"].data_ptr() and made.scale.nbytes <= row.copied * w.nbytes


def test_memory_counts_a_second_layout(checkpoint: Callable[[str], Path]) -> None:
    s = pieces.read(checkpoint(FIXTURES[0]))
    options = plan.Options(EngineConfig(model="x"))
    one = plan.make(s, hardware.parse("H200"), options, specs=WITHOUT_CUDA)
    two = plan.make(s, hardware.parse("H200"), options, specs=(*MORE, *WITHOUT_CUDA))
    both = [p.layer.weight_bytes for p in two.layers if p.copies(tied=False) > 0]
    assert both and two.memory.weights[0] == one.memory.weights[0] + sum(both)
    cuda = plan.make(s, hardware.parse("H200"), options)  # a prompt reads what is stored
    names = [(p.layer.weight_bytes, {k.kernel.name for k in p.choice.picks if k.kernel.prepare}) for p in cuda.layers]
    more = sum(size * len(layouts) for size, layouts in names)
    assert more > 0 and cuda.memory.weights[0] == one.memory.weights[0] + more


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels; tests/kernels run them on a GPU")
def test_bound_triton_kernels_give_the_logits_of_the_references(
    checkpoint: Callable[[str], Path], spied: Calls
) -> None:
    folder = str(checkpoint("q35moe-vl-mixed-w4a16-fp8-modelopt"))
    llm = LLM(folder, device="cpu", dtype="float16", kv_cache_dtype="f16", show_progress=False)
    ids = [5, 300, 17, 2]
    want = llm.logits(ids)
    config = EngineConfig(model="x", dtype="float16", kv_cache_dtype="f16")
    made = plan.make(llm.plan.subject, hardware.parse("H200"), plan.Options(config), specs=WITHOUT_CUDA)
    ops = {path: op for path, op in llm.engine.runner.model.ops.items() if path.startswith("layers.3.")}
    runner.bind(ops, made)  # one layer: the interpreter takes a minute for all of them
    spied.clear()
    got = llm.engine.logits(ids, [3, 1]).float()
    assert (got - want).norm() < 1e-2 * want.norm()
    assert {kernel for kernel, _, _ in spied if kernel.startswith("triton")} == {
        "triton_w4a16_linear", "triton_w4a16_experts",
    }  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FIXTURES)
def test_on_a_gpu_the_planned_kernels_are_as_close_as_the_references(
    name: str, checkpoint: Callable[[str], Path], spied: Calls
) -> None:
    """In bf16 against f32: these random models turn its rounding into some percent, whoever multiplies."""
    folder, ids = str(checkpoint(name)), torch.randint(512, (96,), generator=torch.manual_seed(0)).tolist()
    want = LLM(folder, device="cpu", dtype="float32", kv_cache_dtype="f32", show_progress=False).logits(ids)
    exact = ["linear=triton_w4a16_linear,torch_linear,reference_linear"]  # not W8A8, where the checkpoint asks for it
    off, ran = [], []
    for kernel in (["linear=reference_linear", "experts=reference_experts"] if "moe" in name else
                   ["linear=reference_linear"], exact, []):  # fmt: skip
        spied.clear()
        llm = LLM(folder, device="cuda", dtype="bfloat16", kv_cache_dtype="bf16", kernel=kernel, show_progress=False)
        got = torch.cat([llm.engine.logits(ids, chunks) for chunks in ([96], [80, *[1] * 16])]).cpu().float()
        off.append(float((got - torch.cat([want, want])).norm() / got.norm()))
        ran.append({row for row, _, _ in spied})
    assert "triton_w4a16_linear" in ran[1] | ran[2] or "moe" in name
    assert off[1] < 1.3 * off[0], (off, ran)
    # FP8 inputs are 16 times coarser than bf16: 4.2 times the error here, by the reference on a CPU.
    assert off[2] < (6 if "torch_w8a8_linear" in ran[2] else 1.3) * off[0], (off, ran)


# --- a block of experts as one operation ------------------------------------------------------------------------------

CUDA = "cuda_w4a16_experts"
INSIDE = ("layers.0.mlp.experts", *(f"layers.0.mlp.{name}" for name in MOE_BLOCK))


def planned(s: pieces.Subject, *kernel: str, tp: int = 1, **settings: Any) -> plan.Plan:
    config = EngineConfig(model="x", kernel=list(kernel or ("experts=cuda_w4a16_experts",)), **settings)
    return plan.make(s, hardware.parse("H200"), plan.Options(config, plan.Layout(tp)))


def test_the_plan_makes_one_operation_of_a_block_and_says_so(checkpoint: Callable[[str], Path]) -> None:
    few: dict[str, Any] = {"max_num_batched_tokens": 64}
    s = pieces.read(checkpoint("q35moe-w4a16-modelopt"))
    made, options = planned(s, **few), plan.Options(EngineConfig(model="x", kernel=[f"experts={CUDA}"], **few))
    apart = [dataclasses.replace(row, routes=False) for row in SPECS]
    parts = plan.make(s, hardware.parse("H200"), options, specs=apart)
    by_path = {p.layer.path: p for p in made.layers}
    inside = [p.layer.path for p in made.layers if all(pick.inside for pick in p.choice.picks)]
    assert sorted(p for p in inside if p.startswith("layers.0.")) == sorted(INSIDE) and len(inside) == 4 * len(INSIDE)
    assert {pick.inside for path in inside for pick in by_path[path].choice.picks} == {"layers.*.mlp.experts"}
    launches = [by_path[path].choice.picks[0].kernel.launches[0] for path in INSIDE[1:]]
    assert launches == [1, 0, 0, 0, 0] and made.step_us(0) < parts.step_us(0)
    bytes_ = [sum(p.choice.picks[0].cost.bytes for p in one.layers) for one in (made, parts)]
    assert bytes_[0] == bytes_[1] and len(plan_text.folded(made.layers)) == len(plan_text.folded(parts.layers))
    assert "cuda_w4a16_experts as a block, norm to residual, " in plan_text.why(made, INSIDE[0])
    assert "cuda_w4a16_experts inside layers.*.mlp.experts, " in plan_text.why(made, INSIDE[2])


def test_a_block_stays_apart_for_a_reason(checkpoint: Callable[[str], Path]) -> None:
    s, few = pieces.read(checkpoint("q35moe-w4a16-modelopt")), {"max_num_batched_tokens": 64}

    def reason(made: plan.Plan) -> str:
        found = {p.layer.path: p for p in made.layers}
        assert not any(pick.inside for path in INSIDE for pick in found[path].choice.picks)
        p = found[INSIDE[0]]
        return dict(p.choice.rejected)["block"]

    assert "needs gates in float16, not bf16" in reason(planned(s, dtype="float16", **few))
    assert "on one rank" in reason(planned(s, tp=2, **few))
    asked = "linear=reference_linear", "experts=cuda_w4a16_experts"
    assert "leaves to --kernel" in reason(planned(s, *asked, **few))
    plain = dataclasses.replace(s, formats=s.formats | {INSIDE[-1]: s.formats[INSIDE[1]]})
    assert "a shared expert in nvfp4" in reason(planned(plain, **few))
    many = dataclasses.replace(s.cfg, num_experts_per_tok=32)
    assert "as wide as one or some" in reason(planned(dataclasses.replace(s, cfg=many), **few))


@pytest.mark.skipif(torch.cuda.is_available() or emulator.COMPILER is None, reason="emulates the kernels with g++")
@pytest.mark.parametrize("apart", [False, True])
def test_a_bound_block_gives_what_its_parts_give(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, apart: bool
) -> None:
    monkeypatch.setattr(nvrtc, "kernel", emulator.kernels(request.config.cache.mkdir("emulator")))
    monkeypatch.setattr(cuda_experts, "gpu_here", lambda device: Gpu(3, 227 << 10, True))
    llm = LLM(str(checkpoint("q35moe-w4a16-modelopt")), device="cpu", dtype="bfloat16", show_progress=False)
    model = llm.engine.runner.model
    layer, x = model.layers[0], torch.randn(5, 128).bfloat16()
    want = x + layer.mlp(layer.post_norm(x))
    names = [f"{n}_proj" for n in ("gate", "up", "down")]
    ops, gates = model.ops, [f"layers.0.mlp.{name}" for name in MOE_BLOCK[:2]]
    shared = [w for name in names for w in ops[f"layers.0.mlp.shared_expert.{name}"].weights]
    told = (layer.mlp.experts.router, ops[INSIDE[0]].weights, *(ops[g].weights[0] for g in gates), shared)
    assert torch.equal(experts.block(x, layer.post_norm.weight, layer.post_norm.eps, *told), want)
    kernel = ["experts=cuda_w4a16_experts", *["linear=reference_linear"] * apart]
    made = planned(llm.plan.subject, *kernel, max_num_batched_tokens=64)
    monkeypatch.setattr(cuda_experts, "MAX_PAIRS", 9)  # so that it takes several rounds
    runner.bind({path: ops[path] for path in INSIDE}, made)
    assert layer.block.binds(5) != apart and ops[INSIDE[0]].at(5).function == ("routed" if apart else "block")
    assert all(bool(ops[path].weights) == apart for path in INSIDE[1:])  # nobody reads them any more
    got = x + layer.mlp(layer.post_norm(x)) if apart else layer.block(x)
    assert (got.double() - want.double()).norm() < 1e-2 * (want - x).double().norm()
    assert torch.isfinite(llm.engine.logits([1, 2, 3])).all()


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    c = Checkpoint.of("q35moe-w4a16-modelopt")
    c.text_config["tie_word_embeddings"] = c.config["tie_word_embeddings"] = True
    c.tensors = {name: t for name, t in c.tensors.items() if not name.startswith("lm_head")}
    model = LLM(str(c.save(tmp_path)), device="cpu", show_progress=False).engine.runner.model
    (head,) = model.ops["lm_head"].weights
    assert isinstance(head, Weight) and head.format.name == "f32"
    assert head.parts["data"].data_ptr() == model.embed_tokens.table.parts["data"].data_ptr()


@pytest.mark.parametrize(
    ("kernel", "word"),
    [
        ("experts=triton_w4a16_experts", "what works: reference_experts"),
        ("linear=marlin", "is no kernel for linear"),
        ("linear=triton_w4a16_linear", "has nothing to run"),
    ],
)
def test_a_kernel_that_cannot_run_fails_before_a_weight_is_read(  # B4, B5
    kernel: str, word: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("fp4ward.llm.load", lambda *_, **__: pytest.fail("weights were read"))
    folder, more = str(checkpoint("q35moe-w4a16-modelopt")), [] if "nothing" in word else ["--dtype", "float16"]
    command = ["generate", folder, "--device", "cpu", "--prompt-token-ids", "1", "--kernel", kernel, *more]
    assert main(command) == 2
    assert word in capsys.readouterr().err
    with pytest.raises(UserError, match="room"):
        LLM(folder, device="cpu", kv_cache_memory_bytes=1 << 50, max_num_seqs=1 << 20, max_num_batched_tokens=1 << 20)


def test_a_wish_reaches_the_engine(checkpoint: Callable[[str], Path], spied: Calls) -> None:
    folder = str(checkpoint("q35moe-w4a16-modelopt"))
    llm = LLM(folder, device="cpu", kernel=["linear=reference_linear"], show_progress=False)
    llm.logits([1, 2])
    assert {name for name, _, _ in spied} == {"reference_linear", "reference_experts"}
    with pytest.raises(UserError, match="a list of texts"):
        LLM(folder, kernel="linear=reference_linear")


def test_a_gpu_without_a_row_is_planned_by_what_its_sm_can_run(checkpoint: Callable[[str], Path]) -> None:
    s = pieces.read(checkpoint(FIXTURES[0]))
    for sm, kernel in ((86, "triton_w4a16_experts"), (70, "reference_experts")):
        hw = hardware.seen("NVIDIA A10 something", sm, 22 << 30)
        made = plan.make(s, hw, plan.Options(EngineConfig(model="x")), specs=WITHOUT_CUDA)
        assert {p.choice.picks[0].kernel.name for p in made.layers if p.layer.op == "experts"} == {kernel}
    whole = hardware.seen("NVIDIA H200", 90, 150 << 30)
    assert whole == dataclasses.replace(hardware.parse("H200"), memory=whole.memory)


def test_what_no_kernel_reads_is_let_go(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every regime has a layout of its own, the stored one would double a model's memory."""
    row = KernelSpec("packed", "linear", ("nvfp4",), "linear", specs.TESTED, prepare="pack", **FAST)
    s = pieces.read(checkpoint(FIXTURES[0]))
    made = plan.make(s, hardware.parse("H200"), plan.Options(EngineConfig(model="x")), specs=(row, *SPECS))
    paths = [p.layer.path for p in made.layers if all(pick.kernel is row for pick in p.choice.picks)]
    ops = {path: Op(linear.reference, allocate(NVFP4, (32, 32), torch.device("cpu"))) for path in paths}
    old = [weakref.ref(part) for op in ops.values() for w in op.weights for part in w.parts.values()]
    kernel = object()
    monkeypatch.setattr(runner, "code", lambda spec, name: (lambda w: w.shape) if name == "pack" else kernel)
    runner.bind(ops, made)
    assert ops and old and not any(part() is not None for part in old)
    assert {(op.weights, op.ways) for op in ops.values()} == {((), (Way(ANY, kernel, ((32, 32),), "reference"),))}


def peak(call: Callable[[], object]) -> int:
    """Most bytes that a call holds at once beside what was there before, temporaries of torch's own code included."""
    call()
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "shape", "tokens"),
    [
        ("linear", (2048, 32), 8192),  # activations are more than a decoded block
        ("linear", (4096, 2048), 1),  # a decoded block is more than the activations
        ("experts", (2, 32, 1024), 8192),
        ("experts", (2, 1024, 32), 8192),
        ("experts", (2, 2048, 2048), 1),
    ],
)
def test_an_operation_takes_no_more_scratch_than_planned(
    op: str, shape: tuple[int, ...], tokens: int, dtype: str
) -> None:
    def weight(*shape: int) -> Weight:
        w = allocate(NVFP4, shape, torch.device("cpu"))
        for part in w.parts.values():
            part.view(torch.uint8).zero_()
        return w

    layer = LayerDesc("x", op, "nvfp4", (NVFP4,), shape, (shape,), top_k=1)
    config = EngineConfig(model="x", dtype=dtype, max_num_batched_tokens=tokens, max_num_seqs=1, max_model_len=64)
    *e, n, k = shape
    x, route = torch.zeros(tokens, k, dtype=getattr(torch, dtype)), experts.route(torch.zeros(tokens, 2), 1)
    if op == "linear":
        w = weight(n, k)
        took = peak(lambda: linear.reference(x, w))
    else:
        gate, up, down = weight(*e, n, k), weight(*e, n, k), weight(*e, k, n)
        took = peak(lambda: experts.reference(x, gate, up, down, *route))
    planned = memory._scratch([layer], config)
    assert took <= planned
    for term in (memory.DECODE_BLOCK, planned - memory.DECODE_BLOCK):  # neither would do alone, where it is the larger
        assert took > planned - term or term < planned / 2


@pytest.mark.parametrize("name", [FIXTURES[0], FIXTURES[4]])
def test_a_step_takes_no_more_scratch_than_planned(
    checkpoint: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4ward.plan.UNPACK_BYTES", 0)
    llm = LLM(str(checkpoint(name)), device="cpu", max_num_batched_tokens=256, show_progress=False)
    one, prompt = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), [7] * 256
    assert llm.plan.memory is not None
    assert 1 << 18 < peak(lambda: llm.generate([prompt, *[[5]] * 8], one)) <= llm.plan.memory.scratch
