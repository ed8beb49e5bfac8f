"""Plans: legal kernels or a sentence, cuts, memory as the engine takes it, and what every published plan says."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp4ward import hardware, memory, pieces, plan, plan_text
from fp4ward.cli import main
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.facts import STATELESS, PagedKv, qwen3_5
from fp4ward.formats.formats import FORMATS
from fp4ward.kernels import cuda_experts, cuda_linear, specs
from fp4ward.kernels.specs import SPECS, Batch, KernelSpec, LayerDesc, estimate, unfit, weight_bytes
from fp4ward.pieces import Layout, Subject, local_shape
from tests.build import Checkpoint

FIXTURES = (
    "q35moe-w4a16-modelopt", "q35moe-nvfp4-w4a4-modelopt", "q35moe-nvfp4a16-ct", "q35moe-vl-mixed-w4a16-fp8-modelopt",
    "q35dense-vl-mixed-w4a16-fp8-modelopt",
)  # fmt: skip
NEMOTRON = ("nemotronh-nvfp4-modelopt", "nemotronh-latent-mixed-modelopt")
NANO, LIGHTNING = (f"nvidia/NVIDIA-Nemotron-{name}-30B-A3B-NVFP4" for name in ("3-Nano", "3.5-Lightning"))
H200, CPU = hardware.parse("H200"), hardware.parse("cpu")
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
ENGINE = EngineConfig(model="x")
WITHOUT_CUDA = tuple(s for s in SPECS if not s.module.startswith("cuda"))
W4A16 = {op: {f"{made}_w4a16_{op}" for made in ("cuda", "triton")} for op in ("linear", "experts")}
LIMITS: dict[str, Any] = {"memory": 1.0, "cuts": (specs.Cut(1),), "launches": (0, 0)}  # of a kernel that nothing beats


def make(subject: Subject, gpu: str = "H200", layout: Layout = plan.ONE_RANK, **more: Any) -> plan.Plan:
    replicate = tuple(more.pop("replicate", ()))
    table = more.pop("specs", SPECS)
    options = plan.Options(EngineConfig(model="x", **more), layout, replicate)
    return plan.make(subject, hardware.parse(gpu), options, specs=table)


@pytest.fixture(scope="session")
def subject(checkpoint: Callable[[str], Path]) -> Callable[[str], Subject]:
    return lambda name: pieces.read(checkpoint(name), name)


@pytest.fixture(scope="session")
def public(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """A published checkpoint as its JSON describes it."""

    def read(name: str) -> Subject:
        folder = tmp_path_factory.mktemp("public")
        for part in ("config", "hf_quant_config"):
            source = published / f"{name.replace('/', '--')}_{part}.json"
            if source.exists():
                shutil.copyfile(source, folder / f"{part}.json")
        return pieces.read(folder, name)

    return read


def kernels(made: plan.Plan, ending: str) -> set[str]:
    """Kernels of the operations whose path ends so, over all regimes."""
    found = [p for p in made.layers if p.layer.path.endswith(ending)]
    assert found, ending
    return {pick.kernel.name for p in found for pick in p.choice.picks}


# --- golden plans -----------------------------------------------------------------------------------------------------


def golden(name: str, made: plan.Plan) -> None:
    """The text as committed; FP4WARD_UPDATE_GOLDEN=1 writes it anew, to be read before it is committed."""
    path, text = GOLDEN / f"plan-{name}.txt", plan_text.render(made) + "\n"
    if os.environ.get("FP4WARD_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("gpu", ["H200", "cpu"])
@pytest.mark.parametrize("name", [*FIXTURES, *NEMOTRON])
def test_golden_plans_of_the_fixtures(subject: Callable[[str], Subject], name: str, gpu: str) -> None:
    golden(f"{name}-{gpu}", make(subject(name), gpu))


@pytest.mark.parametrize(
    ("name", "gpu", "layout"),
    [
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "H20", Layout(8, 8)),  # B39
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "H200", Layout(1)),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "H200", Layout(2)),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "B200", Layout(4, 4, 4)),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "H200", Layout(1)),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "RTX-PRO-6000", Layout(1)),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "H200", Layout(1)),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "RTX-5090", Layout(1)),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "GB10", Layout(1)),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "cpu", Layout(1)),
        ("nvidia/Qwen3.6-27B-NVFP4", "H200", Layout(1)),
        ("nvidia/Qwen3.6-27B-NVFP4", "RTX-PRO-6000", Layout(1)),
        (NANO, "H200", Layout(1)),
        (NANO, "RTX-5090", Layout(1)),
        (NANO, "cpu", Layout(1)),
        (LIGHTNING, "H20", Layout(8)),
        (LIGHTNING, "H200", Layout(2, 2)),
        (LIGHTNING, "GB10", Layout(1)),
    ],
)
def test_golden_plans_of_published_models(
    public: Callable[[str], Subject], name: str, gpu: str, layout: Layout
) -> None:
    ranks = f"-tp{layout.tp}-ep{layout.ep}-adp{layout.adp}" if layout.tp > 1 else ""
    golden(f"{name.partition('/')[2]}-{gpu}{ranks}", make(public(name), gpu, layout))


def test_an_unknown_architecture_is_a_sentence(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("config", "hf_quant_config"):
        shutil.copyfile(published / f"nvidia--Qwen3-235B-A22B-NVFP4_{part}.json", tmp_path / f"{part}.json")
    path = GOLDEN / "plan-Qwen3-235B-A22B-NVFP4-refused.txt"
    assert main(["plan", str(tmp_path), "--gpu", "H200"]) == 2
    said = capsys.readouterr()
    if os.environ.get("FP4WARD_UPDATE_GOLDEN"):
        path.write_text(said.err)
    assert (said.out, said.err) == ("", path.read_text())


# --- an architecture whose forward does not exist ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NEMOTRON)
def test_what_has_no_kernel_is_marked_and_counts_with_its_floor(subject: Callable[[str], Subject], name: str) -> None:
    made = make(subject(name))
    lacking = [p for p in made.layers if p.layer.op in ("mamba2", "relu2_experts")]
    assert len(lacking) == 4
    for p in lacking:
        assert all(k.kernel.module == "" and k.cost.us == pytest.approx(k.cost.floor_us) for k in p.choice.picks)
    others = [p for p in made.layers if p not in lacking]
    assert all(specs.installed(k.kernel.module) for p in others for k in p.choice.picks)
    told = {n.code: n.where for n in made.notices}
    assert told["no-forward"] == "NemotronHForCausalLM"
    assert told["no-kernel"] == "layers.*.mamba2, layers.*.mixer.experts"
    layers = {x["path"]: x["kernels"]["1"]["kernel"] for x in plan_text.record(made)["layers"]}
    assert layers["layers.0.mamba2"] is None and layers["layers.0.mixer.in_proj"] is not None
    assert "these kernels at least" in plan_text.render(made)
    assert "none is not written yet" in plan_text.why(made, "layers.0.mamba2")
    unknown = dataclasses.replace(made.layers[1].layer, op="conv3d")
    with pytest.raises(UserError, match="no kernel can run layer"):  # B5: only what is known to lack one may
        plan.choose(unknown, [], H200, "bfloat16", {}, SPECS)


def test_nemotron_takes_what_was_worked_out_by_hand(public: Callable[[str], Subject]) -> None:
    """Nemotron-3-Nano: 23 x (128 experts + 2 shared) of 2 x 1856 x 2688 and 17 of 23 Mamba pairs in 4.5 bits, 6 pairs,
    6 attention layers, table and head in 16."""
    made, twice = make(public(NANO), specs=WITHOUT_CUDA), make(public(NANO))
    experts, pair = 23 * 130 * 2 * 1856 * 2688, 10304 * 2688 + 2688 * 4096
    attention, tables = 6 * 2 * (4096 + 256) * 2688, 2 * 131072 * 2688
    bits = 4.5 * (experts + 17 * pair + 23 * 128 * 2688) + 16 * (6 * pair + attention + tables)
    assert made.memory.weights[0] == pytest.approx(bits / 8, rel=0.005)
    second = 4.5 / 8 * (23 * 2 * 2 * 1856 * 2688 + 17 * pair + 23 * 128 * 2688)  # dense NVFP4, for few tokens
    assert twice.memory.weights[0] - made.memory.weights[0] == pytest.approx(second, rel=0.005)
    assert made.memory.slot == 23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2)
    assert made.memory.page == 6 * 2 * 16 * 2 * 128
    token = next(p for p in made.layers if p.layer.op == "relu2_experts").choice.picks[0].cost
    assert token.flops == 2 * 2 * 1856 * 2688 * 6 and token.bytes == pytest.approx(
        6 * 2 * 1856 * 2688 * 9 / 16, rel=0.01
    )


@pytest.mark.parametrize(
    ("tp", "ep", "place"), [(8, 1, "width / 8 (256/192)"), (8, 8, "experts / 8"), (2, 2, "experts / 2")]
)
def test_nemotron_is_cut_in_uneven_units(public: Callable[[str], Subject], tp: int, ep: int, place: str) -> None:
    s = public(LIGHTNING)  # F25, B34
    made = make(s, "H20", Layout(tp, ep))
    places = {p.layer.path: (p.layer.place, p.layer.local) for p in made.layers}
    assert places["layers.1.mixer.experts"][0] == place
    assert places["layers.0.mamba2"] == (f"heads / {tp}", ((64 // tp, 64, 128),))
    assert places["layers.0.mixer.in_proj"][1] == ((10304 // tp, 2688),)
    assert pieces.pieces(s, Layout(tp, ep)).states[0][1] is STATELESS
    whole = make(s, "H20", Layout(tp, ep), replicate=["layers.0.mixer", "layers.*.mixer.shared_experts"])  # B30
    places = {p.layer.path: (p.layer.place, p.layer.local) for p in whole.layers}
    assert places["layers.0.mamba2"] == ("on every rank", ((64, 64, 128),))
    assert places["layers.1.mixer.shared_experts.up_proj"][0] == "on every rank"
    with pytest.raises(UserError, match="cannot be shared by 16 ranks"):
        pieces.pieces(s, Layout(16))  # 8 groups of heads, each normed as one


def test_the_largest_published_model_is_planned_on_eight_h20(public: Callable[[str], Subject]) -> None:
    made = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), "H20", Layout(8, 8))  # B39, B8
    assert made.failures == () and made.memory.context == 262144
    assert kernels(made, "mlp.experts") <= W4A16["experts"]
    ceiling = 1e6 / made.step_us(0, floor=True)
    # 17 billion active weights: 60 x 10 experts of 3 x 1024 x 4096 in 4.5 bits over the ranks, the rest in 16 bits.
    assert 1000 < ceiling < 2000
    alone = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), "H200")
    assert alone.failures[0].endswith("weights take 221.3") and "; --tp 2 fits, but on paper" in alone.failures[1]


def test_the_floor_of_a_step_is_what_was_worked_out_by_hand(public: Callable[[str], Subject]) -> None:
    """Qwen3.6-35B-A3B on an H200: 2.3 GB at one token, 26 GB at 64, at the 4.47 TB/s that were measured."""
    made = make(public("nvidia/Qwen3.6-35B-A3B-NVFP4"), max_num_seqs=64)
    assert made.step_us(0, floor=True) == pytest.approx(520, rel=0.05)
    assert made.step_us(2, floor=True) == pytest.approx(5900, rel=0.05)


# --- which kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["A100", "L40S", "H20", "H100", "H200"])
@pytest.mark.parametrize("name", FIXTURES)
def test_without_fp4_cores_nvfp4_runs_w4a16(subject: Callable[[str], Subject], name: str, gpu: str) -> None:
    for p in make(subject(name), gpu).layers:  # B1
        apart = {pick.kernel.name for pick in p.choice.picks if not pick.inside or p.layer.op == "experts"}
        inside = {pick.kernel.name for pick in p.choice.picks if pick.inside}
        assert inside <= {"cuda_w4a16_experts"}
        if p.layer.stored.startswith("nvfp4"):
            assert apart <= W4A16[p.layer.op] and p.choice.picks[-1].kernel.name == f"triton_w4a16_{p.layer.op}"
            assert p.runs == "nvfp4 W4A16" and p.takes == "high"
        elif p.layer.op == "linear":  # B3: the choice is each layer's own
            assert apart <= {"torch_linear", "reference_linear", "cuda_w8a16_linear"}
            assert p.runs.startswith(p.layer.stored.partition(" ")[0]) and p.takes == "high"


def test_a_kernel_that_nobody_has_judged_waits_to_be_asked_for(subject: Callable[[str], Subject]) -> None:
    path = "layers.0.linear_attn.out_proj"
    rows = [dataclasses.replace(s, status=specs.NEVER_RUN) if s.name == "cuda_w8a16_linear" else s for s in SPECS]

    def chosen(**more: Any) -> plan.Choice:
        made = make(subject("q35moe-vl-mixed-w4a16-fp8-modelopt"), "H200", specs=rows, **more)
        (p,) = [p for p in made.layers if p.layer.path == path]
        assert p.layer.stored.endswith("W8A8")
        return p.choice

    plain = dict(chosen().rejected)
    assert {pick.kernel.name for pick in chosen().picks} == {"reference_linear"}
    for name, why, many in (
        ("cuda_w8a16_linear", "is compiled, never run on this hardware", "reference_linear"),
        ("torch_w8a8_linear", "quantizes its input to fp8, which no trained model has been judged with", None),
    ):
        few = " (with another for more than 64 tokens)" if many else ""
        assert plain[name] == f"{why}; --kernel linear={name}{few} asks for it"
        rest = "torch_linear,triton_w4a16_linear" + (f",{many}" if many else "")
        asked = [pick.kernel.name for pick in chosen(kernel=[f"linear={name},{rest}"]).picks]
        assert (asked[0], asked[-1]) == (name, many or name) and set(asked) <= {name, many}
    fast = dataclasses.replace(next(s for s in SPECS if s.name == "torch_w4a4_linear"), **LIMITS)
    wide = make(subject("q35moe-nvfp4-w4a4-modelopt"), "B200", specs=(*SPECS, fast))
    assert "torch_w4a4_linear" not in kernels(wide, "lm_head")


def test_kernels_for_few_tokens_share_a_layer_with_one_for_many(subject: Callable[[str], Subject]) -> None:
    wish = ("linear=cuda_w4a16_linear,cuda_w8a16_linear,triton_w4a16_linear,reference_linear,torch_linear",)
    made = make(subject("q35moe-vl-mixed-w4a16-fp8-modelopt"), "H200", kernel=wish)
    for stored, few, many in (
        ("nvfp4", "cuda_w4a16_linear", "triton_w4a16_linear"),
        ("fp8", "cuda_w8a16_linear", "reference_linear"),
    ):
        (first, *_) = [p for p in made.layers if p.layer.op == "linear" and p.layer.stored.startswith(stored)]
        names = [pick.kernel.name for pick in first.choice.picks]
        assert (names[0], names[-1]) == (few, many), first.layer.path
    with pytest.raises(UserError, match="1 to 64; add to --kernel one of triton_w4a16_linear, reference_linear"):
        make(subject("q35moe-w4a16-modelopt"), "H200", kernel=("linear=cuda_w4a16_linear",))


@pytest.mark.parametrize("gpu", ["B200", "B300"])
def test_w4a4_on_fp4_cores_says_which_kernel_runs_it(subject: Callable[[str], Subject], gpu: str) -> None:
    made = make(subject("q35moe-nvfp4-w4a4-modelopt"), gpu)  # B2
    assert kernels(made, "mlp.experts") <= W4A16["experts"]
    (notice,) = [n for n in made.notices if n.code == "activation-unused"]
    assert "nvfp4 inputs" in notice.text
    forced = {"gpu": gpu, "kernel": ["linear=torch_w4a4_linear,torch_linear"]}
    made = make(subject("q35moe-nvfp4-w4a4-modelopt"), **forced)
    assert kernels(made, "self_attn.q_proj") == {"torch_w4a4_linear"}
    q = next(p for p in made.layers if p.layer.path == "layers.3.self_attn.q_proj")
    assert (q.copies(tied=False), q.copies(tied=True)) == (0, 0.125)  # it shares the stored codes, a ninth are scales
    with pytest.raises(UserError, match=r"quantizes its input to nvfp4, which this layer .nvfp4 W4A16. does not allow"):
        make(subject("q35moe-vl-mixed-w4a16-fp8-modelopt"), **forced)  # never promoted


@pytest.mark.parametrize("gpu", ["RTX-5090", "RTX-PRO-6000", "GB10"])
def test_sm_120_runs_w4a16_everywhere(subject: Callable[[str], Subject], gpu: str) -> None:
    made = make(subject("q35moe-vl-mixed-w4a16-fp8-modelopt"), gpu)  # B9: dense, head and experts, all regimes
    for ending in ("shared_expert.up_proj", "lm_head", "mlp.experts"):
        assert all("_w4a16_" in name for name in kernels(made, ending))


def test_half_precision_is_supported(subject: Callable[[str], Subject]) -> None:
    made = make(subject("q35moe-w4a16-modelopt"), dtype="float16")  # B10
    assert kernels(made, "mlp.experts") <= W4A16["experts"]
    assert kernels(made, "layers.0.mlp.gate") == {"reference_linear"}  # bf16 weights, f16 activations


def test_mixed_checkpoints_choose_by_layer(public: Callable[[str], Subject]) -> None:
    made = make(public("nvidia/Qwen3.6-35B-A3B-NVFP4"))  # B11
    stored = {p.layer.path.rpartition(".")[2]: p.layer.stored for p in made.layers}
    assert (stored["q_proj"], stored["experts"], stored["gate"]) == ("fp8_tensor W8A8", "nvfp4 W4A16", "bf16")


def test_experts_that_differ_by_json_are_refused(tmp_path: Path) -> None:
    c = Checkpoint.of("q35moe-w4a16-modelopt")  # B11
    config = c.documents["config.json"]
    config.pop("quantization_config", None)
    layers = {f"model.layers.0.mlp.experts.{e}.gate_proj": {"quant_algo": "W4A16_NVFP4"} for e in range(8)}
    layers["model.layers.0.mlp.experts.3.gate_proj"] = {"quant_algo": "FP8"}
    quant = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    with pytest.raises(UserError, match=r"experts of one layer must share a format.*experts\.3\.gate_proj"):
        pieces.read(tmp_path)


def test_nvfp4_of_odd_rows_is_refused_by_json_alone(tmp_path: Path) -> None:
    for part in ("config", "hf_quant_config"):
        shutil.copyfile(
            Path(__file__).parent.parent / "fixtures" / FIXTURES[0] / f"{part}.json", tmp_path / f"{part}.json"
        )
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("text_config", config)["hidden_size"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    gc.disable()
    try:
        with pytest.raises(UserError, match="nvfp4 needs rows in multiples of 16, config"):
            pieces.read(tmp_path)
        assert not gc.isenabled()  # as the caller had it
    finally:
        gc.enable()


def test_a_forced_kernel_runs_or_the_plan_fails(subject: Callable[[str], Subject]) -> None:
    s = subject("q35moe-vl-mixed-w4a16-fp8-modelopt")
    lean = [row for row in SPECS if row.name not in ("cuda_w4a16_linear", "cuda_w4a16_experts")]
    triton = ["linear=triton_w4a16_linear,torch_linear", "experts=triton_w4a16_experts"]  # B4, B6
    both = ["experts=cuda_w4a16_experts,triton_w4a16_experts"]
    for free, forced in ((make(s, specs=lean), make(s, kernel=triton)), (make(s), make(s, kernel=both))):
        for a, b in zip(free.layers, forced.layers, strict=True):
            assert [(p.kernel, p.inside) for p in a.choice.picks] == [(p.kernel, p.inside) for p in b.choice.picks]
    slow = make(s, kernel=["experts=reference_experts"])
    assert kernels(slow, "mlp.experts") == {"reference_experts"}
    assert next(p for p in slow.layers if p.layer.op == "experts").choice.why == "asked for by --kernel"
    with pytest.raises(UserError, match=r"layers.0.mlp.experts.*needs a GPU of SM 80.*works: reference_experts"):
        make(s, "cpu", kernel=["experts=triton_w4a16_experts"], kv_cache_memory_bytes=1 << 20, dtype="bfloat16")
    with pytest.raises(UserError, match="takes bfloat16, float16 activations, not float32"):
        make(s, dtype="float32", kernel=["experts=triton_w4a16_experts"])
    with pytest.raises(UserError, match="has nothing to run: it reads nvfp4"):
        make(s, "cpu", kernel=["linear=triton_w4a16_linear"])  # small enough to be unpacked to f32


def test_absent_experts_cost_nothing_and_copies_of_experts_run(public: Callable[[str], Subject]) -> None:
    s = public("nvidia/Qwen3.5-397B-A17B-NVFP4")  # B7, B8

    def experts(layout: Layout, regime: int) -> Any:
        made = make(s, "H20", layout)  # whatever is dealt to whom, no default makes it an error
        assert kernels(made, "mlp.experts") <= W4A16["experts"]
        p = next(p for p in made.layers if p.layer.op == "experts")
        return p.layer, p.choice.picks[regime].cost

    for regime, tokens in ((0, 1), (2, 64)):
        one, whole = experts(Layout(), regime)
        hit = 512 * (1 - (1 - 10 / 512) ** tokens)
        assert whole.bytes == pytest.approx(hit * one.weight_bytes / 512, rel=0.01)  # not those that no token chose
        for layout in (Layout(8, 8), Layout(8, 8, 8), Layout(8, 4), Layout(6, 3, 6)):
            _, cost = experts(layout, regime)
            share = 1 / layout.tp if layout.tp == 8 else 171 / 512 / 2  # 512 experts over 3: 171, 171, 170
            assert cost.flops == pytest.approx(whole.flops * share) and cost.bytes < whole.bytes * (share + 0.01)
    # Redundant experts: a rank that holds more than its share is legal, and pays for what is chosen among them.
    layer, cost = experts(Layout(8, 8), 0)
    more = dataclasses.replace(layer, local=((72, *layer.local[0][1:]),))
    for row in (x for x in SPECS if x.name in W4A16["experts"]):
        assert unfit(row, more, hardware.parse("H20"), "bfloat16") is None
        batch = Batch(1, 1, 1024, 2, 1)
        assert estimate(row, more, hardware.parse("H20"), batch).flops == pytest.approx(cost.flops * 72 / 64)


def test_each_group_scores_every_token_and_projects_its_own(public: Callable[[str], Subject]) -> None:
    made = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), "B200", Layout(4, 4, 4))
    picks = {p.layer.path: p.choice.picks[2] for p in made.layers if p.layer.path.startswith("layers.0.mlp.")}
    assert picks["layers.0.mlp.gate"].rows == picks["layers.0.mlp.experts"].rows == 64
    assert picks["layers.0.mlp.shared_expert.up_proj"].rows == 16
    assert picks["layers.0.mlp.gate"].cost.flops == 2 * 64 * 512 * 4096


def test_an_expert_map_leads_to_copies_and_past_other_ranks() -> None:
    """Two ranks with an expert map each, the most popular expert on both: together one rank's numbers."""
    import torch

    from fp4ward.formats.weight import Weight
    from fp4ward.kernels.experts import reference

    torch.manual_seed(0)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 0], [2, 3], [0, 1], [3, 2]])
    every = [torch.randn(4, *shape) for shape in ((16, 32), (16, 32), (32, 16))]

    def run(held: list[int], chosen: torch.Tensor) -> torch.Tensor:
        gate, up, down = (Weight(FORMATS["f32"], {"data": w[held]}) for w in every)
        return reference(x, gate, up, down, weights, chosen)

    odd = (torch.arange(5) % 2 == 1)[:, None]  # B7, F29: of expert 0's tokens the odd ones go to its copy
    first = torch.where(ids == 0, torch.where(odd, -1, 0), torch.where(ids == 1, 1, -1))
    second = torch.where(ids == 0, torch.where(odd, 2, 99), torch.where(ids > 1, ids - 2, -1))
    assert torch.allclose(run([0, 1], first) + run([2, 3, 0], second), run([0, 1, 2, 3], ids), atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(8), Layout(8, 8), Layout(8, 4), Layout(8, 8, 2)])
def test_a_shared_expert_is_cut_beside_routed_ones(public: Callable[[str], Subject], layout: Layout) -> None:
    made = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), "H20", layout)  # B29
    place = {p.layer.path.partition("mlp.")[2]: p.layer.place for p in made.layers if ".mlp." in p.layer.path}
    ranks = layout.attention
    assert place["shared_expert.gate_proj"] == place["shared_expert.up_proj"] == f"rows / {ranks}"
    assert place["shared_expert.down_proj"] == f"columns / {ranks}"
    assert place["experts"].startswith(("width / ", "experts / "))


@pytest.mark.parametrize("text", ["linear", "linear=", "linear=marlin", "conv=x", "=", "experts=torch_linear"])
def test_a_wish_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--kernel"):
        plan.parse_wishes([text])


def test_no_kernel_names_every_rejection(subject: Callable[[str], Subject]) -> None:
    rows = tuple(dataclasses.replace(s, dtypes=("float16",)) if s.op == "experts" else s for s in SPECS)
    with pytest.raises(UserError) as e:
        make(subject("q35moe-w4a16-modelopt"), specs=rows)  # B5
    for word in (
        "layers.0.mlp.experts",
        "triton_w4a16_experts takes float16",
        "reference_experts takes",
        "nothing here",
    ):
        assert word in str(e.value)
    few = tuple(dataclasses.replace(s, tokens=(1, 64)) if s.op == "experts" else s for s in SPECS)
    with pytest.raises(UserError, match="with 2048 tokens"):
        make(subject("q35moe-w4a16-modelopt"), specs=few)


def test_what_is_not_installed_is_never_chosen(subject: Callable[[str], Subject]) -> None:
    fast = KernelSpec("fast", "experts", ("nvfp4",), "nowhere", specs.TESTED, **LIMITS)
    made = make(subject("q35moe-w4a16-modelopt"), specs=(fast, *SPECS))
    assert kernels(made, "mlp.experts") == kernels(make(subject("q35moe-w4a16-modelopt")), "mlp.experts")
    rejected = dict(next(p for p in made.layers if p.layer.op == "experts").choice.rejected)
    assert rejected["fast"] == "is not installed (fp4ward.kernels.nowhere)"
    assert [s.name for s in SPECS if not specs.installed(s.module)] == []


def test_a_row_is_held_to_the_shapes_of_every_rank() -> None:
    row = KernelSpec("row", "linear", ("nvfp4",), "linear", specs.TESTED, n_div=128, k_div=64)
    for local, fits in (
        (((128, 64),), True),
        (((160, 64),), False),
        (((128, 96),), False),
        (((256, 64), (160, 64)), False),
    ):
        layer = LayerDesc("x", "linear", "nvfp4 W4A16", (FORMATS["nvfp4"],), (512, 512), local)
        assert (unfit(row, layer, H200, "bfloat16") is None) == fits
    old = dataclasses.replace(row, min_sm=80, max_sm=89)
    layer = LayerDesc("x", "linear", "nvfp4 W4A16", (FORMATS["nvfp4"],), (128, 64), ((128, 64),))
    assert unfit(old, layer, H200, "bfloat16") == "needs a GPU of SM 80 to 89; H200 is SM 90"


def test_experts_wider_than_any_shared_memory_is_known_to_hold_go_elsewhere() -> None:  # what runs can be launched
    row = next(s for s in SPECS if s.name == "cuda_w4a16_experts")
    for shape, fits in (((8, 8192, 4096), True), ((8, 14336, 4096), False), ((8, 512, 8208), False)):
        layer = LayerDesc("x", "experts", "nvfp4 W4A16", (FORMATS["nvfp4"],), shape, (shape,), top_k=2)
        assert (unfit(row, layer, H200, "bfloat16") is None) == fits
        for sm, tokens in ((sm, tokens) for sm in (80, 86, 90, 120) for tokens in (1, 2, 9, 64, 256) if fits):
            assert cuda_experts.choose(tokens, 2, shape, 0, True, cuda_linear.gpu_of(sm, 132), {}, {}).up.shared > 0


def test_regimes_may_run_different_kernels(subject: Callable[[str], Subject]) -> None:
    few = KernelSpec("few", "experts", ("nvfp4",), "experts", specs.TESTED, **LIMITS, tokens=(1, 16))
    made = make(subject("q35moe-w4a16-modelopt"), specs=(few, *WITHOUT_CUDA))
    picks = next(p for p in made.layers if p.layer.op == "experts").choice.picks
    assert [p.kernel.name for p in picks] == ["few", "few", "triton_w4a16_experts", "triton_w4a16_experts"]
    assert "few (1, 2-16), triton_w4a16_experts (17-64, prefill)" in plan_text.render(made)


@pytest.mark.parametrize(
    ("most", "sequences", "adp", "names", "decodes"),
    [
        (2048, 16, 1, ["1", "2-16", "17-64", "prefill"], 2), (2048, 256, 1, ["1", "2-16", "17-64", "prefill"], 3),
        (32, 16, 1, ["1", "2-16", "17-32"], 2), (2048, 1, 1, ["1", "2-16", "17-64", "prefill"], 1),
        (2048, 24, 1, ["1", "2-16", "17-24", "25-64", "prefill"], 3), (1, 1, 1, ["1"], 1),
        (2048, 16, 4, ["1", "2-16", "17-64", "prefill"], 3),
    ],
)  # fmt: skip
def test_regimes_are_steps_that_can_happen(
    subject: Callable[[str], Subject], most: int, sequences: int, adp: int, names: list[str], decodes: int
) -> None:
    limits = {"max_num_batched_tokens": most, "max_num_seqs": sequences}
    made = make(subject("q35moe-w4a16-modelopt"), layout=Layout(adp, adp, adp), **limits)
    assert [r.name for r in made.regimes] == names
    assert [r.prompt for r in made.regimes] == [i >= decodes for i in range(len(names))]
    assert [r.least for r in made.regimes] == [1, *(r.tokens + 1 for r in made.regimes[:-1])]
    assert made.regimes[-1].tokens == most and plan_text.render(made).count("\n  decode ") == decodes


# --- weights and activations are two facts ----------------------------------------------------------------------------


def test_quantized_activations_are_for_layers_that_take_them(subject: Callable[[str], Subject]) -> None:
    name = "torch_w4a4_linear"  # as fast as can be; it is asked for, as every row that quantizes its input must be
    w4a4 = KernelSpec(name, "linear", ("nvfp4",), "linear", specs.TESTED, 100, input="nvfp4", **LIMITS)
    rest = tuple(s for s in SPECS if s.name != name)
    q = "layers.3.self_attn.q_proj"
    asked = {"specs": (w4a4, *rest), "kernel": (f"linear={name},triton_w4a16_linear,torch_linear",)}
    w4a4_model = subject("q35moe-nvfp4-w4a4-modelopt")
    made = make(w4a4_model, "B200", **asked)  # B2, B14
    assert plan.may_quantize_activations(q, made)
    assert next(p for p in made.layers if p.layer.path == q).runs == "nvfp4 W4A4"
    unasked = make(w4a4_model, "B200", specs=(w4a4, *rest))  # no trained model has been judged with it
    assert not any(plan.may_quantize_activations(p.layer.path, unasked) for p in unasked.layers)
    reason = dict(next(p for p in unasked.layers if p.layer.path == q).choice.rejected)[name]
    assert reason.startswith("quantizes its input to nvfp4, which no trained model has been judged with; --kernel ")
    for other in ("q35moe-w4a16-modelopt", "q35moe-nvfp4a16-ct"):  # never promoted, B13, B15, B16
        made = make(subject(other), "B200", **asked)
        assert not any(plan.may_quantize_activations(p.layer.path, made) for p in made.layers)
    reason = dict(next(p for p in made.layers if p.layer.path == q).choice.rejected)[name]
    assert reason == "quantizes its input to nvfp4, which this layer (nvfp4 W4A16) does not allow"
    hopper = make(w4a4_model, **asked)
    assert not any(plan.may_quantize_activations(p.layer.path, hopper) for p in hopper.layers)
    some = (dataclasses.replace(w4a4, tokens=(64, 1 << 20)), *rest)  # only in some regimes: the fusion stays off
    mixed = make(w4a4_model, "B200", **{**asked, "specs": some})
    assert set(next(p for p in mixed.layers if p.layer.path == q).inputs) == {"high", "nvfp4"}
    assert not plan.may_quantize_activations(q, mixed)
    with pytest.raises(UserError, match="no layer"):
        plan.may_quantize_activations("layers.9.x", made)


# --- where each piece lies --------------------------------------------------------------------------------------------


def test_kv_heads_are_repeated_and_value_heads_stay_with_their_key(public: Callable[[str], Subject]) -> None:
    s = public("nvidia/Qwen3.5-397B-A17B-NVFP4")  # 2 KV heads, 16 key heads with 64 value heads
    states = pieces.pieces(s, Layout(8)).states  # F26, B34
    assert {x.heads for state in states for x in state if isinstance(x, PagedKv)} == {1}
    recurrent = [x for x in states[5] if not isinstance(x, PagedKv)]
    assert recurrent[0].ssm == (8, 128, 128) and recurrent[0].conv == (2 * 2 * 128 + 8 * 128, 3)
    with pytest.raises(UserError, match="32 query heads and 2 KV heads cannot be cut over 6 ranks"):
        pieces.pieces(s, Layout(6))
    made = make(s, "H20", Layout(8, 4))
    place = {p.layer.path: (p.layer.place, p.layer.local[0]) for p in made.layers}
    assert place["layers.3.self_attn.k_proj"] == ("rows / 2, each on 4", (256, 4096))
    assert place["layers.0.mlp.experts"] == ("experts / 4, width / 2", (128, 512, 4096))
    assert place["layers.3.attention"] == ("heads / 8", (4, 1, 256))


def test_blocks_stay_whole_where_asked(subject: Callable[[str], Subject]) -> None:
    s = subject("q35moe-w4a16-modelopt")
    made = make(s, layout=Layout(2), replicate=["layers.*.mlp.shared_expert", "layers.3.self_attn"])  # B30
    place = {p.layer.path: p.layer.place for p in made.layers}
    assert place["layers.0.mlp.shared_expert.down_proj"] == place["layers.3.attention"] == "on every rank"
    assert place["layers.0.mlp.experts"] == "width / 2" and place["layers.0.gated_delta"] == "heads / 2"
    paged = {
        x.heads for x in pieces.pieces(s, Layout(2), replicated=["layers.3.*"]).states[1] if isinstance(x, PagedKv)
    }
    assert paged == {s.cfg.num_key_value_heads}
    assert made.memory.weights[0] > make(s, layout=Layout(2)).memory.weights[0]
    with pytest.raises(UserError, match=r"no such block.*layers\.\*\.mlp\.shared_expert"):
        make(s, layout=Layout(2), replicate=["layers.*.self_attn.q_proj"])


@pytest.mark.parametrize(("tp", "ep", "adp"), [(0, 1, 1), (4, 3, 1), (4, 1, 8), (2000, 1, 1)])
def test_an_impossible_layout_is_refused(tp: int, ep: int, adp: int) -> None:
    with pytest.raises(UserError, match=r"--(tp|ep|adp) "):
        Layout(tp, ep, adp)


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, 2), Layout(4, 2, 2), Layout(6, 3, 3)])
def test_the_loader_cuts_as_planned(
    subject: Callable[[str], Subject], checkpoint: Callable[[str], Path], layout: Layout
) -> None:
    from fp4ward.checkpoint.index import open_index
    from fp4ward.checkpoint.load import load

    name = "q35moe-vl-mixed-w4a16-fp8-modelopt"
    s = subject(name)
    for rank in range(layout.tp):
        loaded = load(open_index(checkpoint(name)), s.slots, facts=qwen3_5, rank=rank, layout=layout)
        for slot in s.slots:
            want = local_shape(slot, s.formats.get(slot.name), layout, rank, False)
            assert tuple(loaded.tensors[slot.name].shape) == want, slot.name


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMATS])
@pytest.mark.parametrize("shape", [(32, 256), (160, 288), (1, 16)])
def test_bytes_are_those_of_the_weight_in_memory(name: str, shape: tuple[int, int]) -> None:
    import torch

    from fp4ward.formats.weight import allocate

    assert weight_bytes(FORMATS[name], *shape) == allocate(FORMATS[name], shape, torch.device("cpu")).nbytes


@pytest.mark.parametrize("kv", ["fp8", "bf16", "f32", "f64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_pages_and_slots_are_those_that_the_engine_allocates(
    subject: Callable[[str], Subject], kv: str, dtype: str
) -> None:
    import torch

    from fp4ward.runtime.state import State

    spec = qwen3_5.state_spec(subject("q35moe-w4a16-modelopt").cfg)
    made = State.allocate(
        spec, pages=3, page_size=16, slots=2, dtype=getattr(torch, dtype), kv_dtype=kv, device=torch.device("cpu"),
        kv_scales={}, length=48,
    )  # fmt: skip
    held = sum(t.nbytes for layer in made.layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
    assert held == 3 * memory.page_bytes(spec, 16, kv) + 2 * memory.slot_bytes(spec, dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [FIXTURES[0], FIXTURES[4]])
def test_a_cpu_run_allocates_no_more_than_planned(
    subject: Callable[[str], Subject], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str,
    packed: bool,
) -> None:  # fmt: skip
    from fp4ward.llm import LLM

    if packed:
        monkeypatch.setattr("fp4ward.plan.UNPACK_BYTES", 0)
    made = make(subject(name), "cpu")
    llm = LLM(str(checkpoint(name)), device="cpu", show_progress=False)
    assert llm.engine.limits.max_model_len == made.memory.context
    tensors = [t for layer in llm.engine.runner.state.layers for t in vars(layer).values() if hasattr(t, "nbytes")]
    assert sum(t.nbytes for t in tensors) == made.memory.slots + made.memory.pages * made.memory.page
    seen: dict[int, int] = {}
    stack: list[Any] = [llm.engine.runner.model]
    visited: set[int] = set()
    while stack:  # every tensor that the model holds, once
        x = stack.pop()
        if id(x) in visited:
            continue
        visited.add(id(x))
        if hasattr(x, "untyped_storage"):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, list | tuple):
            stack += x
        elif hasattr(x, "__dict__") and type(x).__module__.startswith("fp4ward"):
            stack += vars(x).values()
    assert 0.8 * made.memory.weights[0] < sum(seen.values()) <= made.memory.weights[0]


def test_the_rank_with_the_least_room_counts(public: Callable[[str], Subject]) -> None:
    made = make(public("nvidia/Qwen3.6-27B-NVFP4"), "RTX-5090", Layout(2))
    assert len(set(made.memory.weights)) == 1
    many = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), "B200", Layout(6, 3, 6))  # 512 experts over 3: 171, 171, 170
    assert len(set(many.memory.weights)) == 2 and many.memory.weights[many.memory.rank] == max(many.memory.weights)


def test_what_does_not_fit_says_what_to_change(public: Callable[[str], Subject]) -> None:
    s = public("nvidia/Qwen3.6-35B-A3B-NVFP4")
    small = make(s, "RTX-4090", max_model_len=262144)
    assert small.failures[0].startswith("--max-model-len 262144: RTX-4090 has room for")
    assert small.failures[-1].startswith("try a shorter --max-model-len, ")  # more ranks are no remedy yet
    assert small.failures[-1].endswith(f"; --tp 2 fits, but {plan.ON_PAPER}")
    assert make(s, "RTX-4090", max_num_seqs=1, max_model_len=4096).failures == ()
    many = make(s, "RTX-4090", max_num_seqs=1000)
    assert "1000 recurrent slots" in many.failures[0]
    lone = make(s, "sm=90,mem=4,bw=1,bf16=1")
    assert lone.failures[0].endswith("weights take 19.5")
    laptop = make(s, "cpu,mem=25", kv_cache_memory_bytes=4 << 30)  # too much for it, a smaller one is not
    assert laptop.failures[-1].startswith("--kv-cache-memory-bytes ") and laptop.failures[-1].endswith("MiB fits")
    size = int(laptop.failures[-1].split()[1].removesuffix("MiB")) << 20
    assert make(s, "cpu,mem=25", kv_cache_memory_bytes=size).failures == ()
    asked = make(s, max_num_seqs=2, max_model_len=4096, kv_cache_memory_bytes=1)  # not all that there is
    size = int(asked.failures[-1].split()[1].removesuffix("MiB")) << 20
    assert 0 <= size - 2 * 256 * asked.memory.page <= 2**20
    enough = make(s, max_num_seqs=2, max_model_len=4096, kv_cache_memory_bytes=size)
    assert enough.failures == () and enough.memory.context == 4096


def test_the_cache_leaves_room_for_a_step(public: Callable[[str], Subject]) -> None:
    made, cpu = (make(public("nvidia/Qwen3.6-35B-A3B-NVFP4"), name) for name in ("RTX-4090", "cpu,mem=23.5"))
    memory_ = made.memory  # room for 22.3 GiB
    assert made.failures == () and memory_.free >= memory_.scratch > 0.2 * (memory_.free + memory_.cache)
    assert cpu.failures == () and cpu.memory.free >= cpu.memory.scratch and cpu.memory.context > 200000
    assert kernels(made, "self_attn.q_proj") == {"cuda_w8a16_linear", "reference_linear"}


def test_a_layout_of_its_own_waits_where_it_takes_the_room(public: Callable[[str], Subject]) -> None:
    """Weights for many tokens are read as stored, so that a kernel for few holds them once more."""
    s, cuda = public("nvidia/Qwen3.6-35B-A3B-NVFP4"), "cuda_w4a16_experts"
    made = make(s, "RTX-5090")  # has room for 30.7 GiB: 19.5 as stored, 1.2 of FP8 again, not 16.9 of experts
    assert made.failures == () and kernels(made, "mlp.experts") == {"triton_w4a16_experts"}
    assert kernels(made, "self_attn.q_proj") == {"cuda_w8a16_linear", "reference_linear"}
    said = f"is {specs.NO_ROOM} (notice no-room)"
    assert dict(next(p for p in made.layers if p.layer.op == "experts").choice.rejected)[cuda] == said
    told = {n.where: n.text for n in made.notices if n.code == "no-room"}
    said = f"{specs.NO_ROOM}: 17.10 GiB, where 7.95 are free for it and the cache; with these settings it does not fit"
    assert told == {cuda: f"{said} on this GPU"}  # the one that saves the least for its bytes waits
    asked = make(s, "RTX-5090", kernel=[f"experts={cuda},triton_w4a16_experts"])
    assert asked.failures[0].startswith("RTX-5090 has room for 30.7 GiB, weights take 3")
    alone = make(s, "RTX-5090", kernel=[f"experts={cuda}"], max_num_batched_tokens=64)  # nobody reads them as stored
    assert alone.failures == () and kernels(alone, "mlp.experts") == {cuda}
    halves = make(s, "RTX-5090", Layout(2), kernel=[f"experts={cuda},triton_w4a16_experts"])
    assert "; --tp 2 fits" in asked.failures[-1] and halves.failures == ()
    huge = make(public("nvidia/Qwen3.5-397B-A17B-NVFP4"), kernel=[f"experts={cuda},triton_w4a16_experts"])
    assert "; --tp 4 fits" in huge.failures[-1]  # stored alone, two ranks would do
    # Without any second layout 262144 pages; one of the experts would leave 12398.
    large = make(public("nvidia/Qwen3.5-122B-A10B-NVFP4"))
    assert kernels(large, "mlp.experts") == {"triton_w4a16_experts"} and large.memory.pages > 200000
    (text,) = (n.text for n in large.notices if n.code == "no-room")
    wish = text.partition("; --kernel ")[2].removesuffix(" asks for it")  # as it stands there it can be typed
    asked = make(public("nvidia/Qwen3.5-122B-A10B-NVFP4"), kernel=[wish])
    assert asked.failures == () and kernels(asked, "mlp.experts") == {cuda, "triton_w4a16_experts"}
    whole = make(s)
    assert kernels(whole, "mlp.experts") == W4A16["experts"] and not [n for n in whole.notices if n.code == "no-room"]


def test_a_second_layout_of_the_weights_has_a_line_of_its_own(public: Callable[[str], Subject]) -> None:
    s, names = public("nvidia/Qwen3.6-35B-A3B-NVFP4"), ["cuda_w4a16_experts", "cuda_w4a16_linear", "cuda_w8a16_linear"]
    made, plain = make(s), make(s, "cpu")
    assert made.memory.weights[0] - made.memory.copied == plain.memory.weights[0]  # once, as they are stored
    text, data = plan_text.render(made), plan_text.record(made)
    assert "19.522 GiB  weights\n     18.559 GiB  second layout of weights, for " + ", ".join(names) in text
    assert data["memory"]["copied"] == made.memory.copied and data["memory"]["copied_for"] == names
    lines = text.partition("\nmemory\n")[2].partition("  one request")[0].splitlines()
    assert sum(float(line.split()[0]) for line in lines) == pytest.approx(H200.memory / hardware.GIB, abs=0.005)
    assert plain.memory.copied == 0 and plain.copied_for == [] and "second layout" not in plan_text.render(plain)
    asked = make(s, "RTX-5090", kernel=["experts=cuda_w4a16_experts,triton_w4a16_experts"])
    assert asked.failures[0].endswith("weights take 36.6 (17.1 of them a second layout)")


# --- what a user should know ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "old"), [("sm=70,mem=32,bw=900,bf16=125", True), ("RTX-3090", False), ("cpu", False)])
def test_a_gpu_older_than_every_kernel_is_told(subject: Callable[[str], Subject], gpu: str, old: bool) -> None:
    made = make(subject("q35moe-w4a16-modelopt"), gpu)
    told = [n for n in made.notices if n.code == "old-gpu"]
    assert len(told) == old and all(n.where == "custom, SM 70" and "need SM 80" in n.text for n in told)
    if old:
        assert {pick.kernel.module for p in made.layers for pick in p.choice.picks} == {
            s.module for s in SPECS if s.name.startswith(("reference_", "torch_linear"))
        }


@pytest.mark.parametrize(
    ("gpu", "dtype", "slow"),
    [("cpu", "bfloat16", True), ("cpu", "float16", True), ("cpu", "float32", False), ("cpu", "float64", False),
     ("H200", "bfloat16", False)],
)  # fmt: skip
def test_16_bit_types_on_a_cpu_are_told_to_be_slow(
    subject: Callable[[str], Subject], gpu: str, dtype: str, slow: bool
) -> None:
    told = [n for n in make(subject("q35moe-w4a16-modelopt"), gpu, dtype=dtype).notices if n.code == "slow-dtype"]
    assert len(told) == slow and all(n.where == f"--dtype {dtype}" and "--dtype float32" in n.text for n in told)


@pytest.mark.parametrize("gpu", ["H200", "cpu"])
def test_speeds_on_a_gpu_say_what_they_leave_out(subject: Callable[[str], Subject], gpu: str) -> None:
    made = make(subject("q35moe-w4a16-modelopt"), gpu)
    assert not [n for n in made.notices if n.code == "not-counted"]  # it concerns plans, not runs
    told = [n for n in plan_text.record(made)["notices"] if n["code"] == "not-counted"]
    assert len(told) == (gpu != "cpu") and all(n["text"] in plan_text.render(made) for n in told)


@pytest.mark.parametrize(("seqs", "says"), [(1, "1 of 1024, 1 of 4096"), (3, "3 of 1024, 3 of 4096")])
def test_as_many_requests_run_at_once_as_the_engine_admits(
    public: Callable[[str], Subject], seqs: int, says: str
) -> None:
    made = make(public("nvidia/Qwen3.6-27B-NVFP4"), max_num_seqs=seqs, max_model_len=4096)
    assert f"at once (--max-num-seqs {seqs}), by tokens: {says}\n" in plan_text.render(made)


def test_rates_below_ten_have_two_digits(public: Callable[[str], Subject]) -> None:
    made = make(public("nvidia/Qwen3.6-35B-A3B-NVFP4"), "cpu,mem=64")
    assert made.step_us(0) == pytest.approx(6.2e6, rel=0.01)  # 0.16 tokens a second
    rows = [line.split() for line in plan_text.render(made).splitlines() if "tok/s" in line]
    assert [(row[row.index("most") + 1], row[-2]) for row in rows][:2] == [("8.3", "0.16"), ("20", "0.51")]


def test_why_takes_what_the_table_prints(public: Callable[[str], Subject]) -> None:
    made = make(public(NANO))  # where layers differ: layers.{0,2,4,...}.mixer.in_proj
    rows = plan_text.folded(made.layers)
    assert {"*", "{"} <= {c for name, _ in rows for c in name}
    for name, group in rows:
        more = f" and {len(group) - 1} more like it" if len(group) > 1 else ""
        said = plan_text.why(made, name)
        assert said.startswith(f"{group[0].layer.path}{more}: ")
        if "{" in name:
            assert "\n\n" not in said  # the one kind alone
    kinds = [name for name, _ in rows if name.endswith("mixer.in_proj")]
    every = plan_text.why(made, "layers.*.mixer.in_proj").split("\n\n")  # one of each kind
    assert len(kinds) == len(every) == 2
    first = plan_text.why(made, "layers.0.mixer.in_proj")
    assert first.splitlines()[1:] == every[0].splitlines()[1:] and first.startswith("layers.0.mixer.in_proj: ")
    with pytest.raises(UserError, match=r"--why 'layers.\*.mlp.gate': the plan has no such layer; there is "):
        plan_text.why(made, "layers.*.mlp.gate")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_loads_no_torch(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copyfile(checkpoint(FIXTURES[0]) / "config.json", tmp_path / "config.json")
    code = (
        "import sys; from fp4ward.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'triton', 'numpy', 'safetensors'} & set(sys.modules)), file=sys.stderr)"
    )
    for folder in (checkpoint(FIXTURES[0]), tmp_path):
        for more in (["--gpu", "H200", "--tp", "2"], ["--json"], ["--why", "lm_head"]):
            done = subprocess.run(
                [sys.executable, "-c", code, "plan", str(folder), *more], capture_output=True, text=True
            )
            assert done.stderr.strip().splitlines()[-1] == "0 []", done.stderr
            assert "lm_head" in done.stdout


def test_the_command(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(checkpoint(FIXTURES[0]))
    assert main(["plan", folder, "--gpu", "H200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tensors_seen"] and record["failures"] == [] and len(record["layers"]) == 49
    assert set(record["layers"][-1]["kernels"]) == {"1", "2-16", "17-64", "prefill"}
    assert main(["plan", folder, "--gpu", "H200", "--why", "layers.0.mlp.experts"]) == 0
    out = capsys.readouterr().out
    for name, means in (("bf16", "bfloat16"), ("half", "float16"), ("fp16", "float16"), ("fp32", "float32")):
        assert main(["plan", folder, "--gpu", "H200", "--dtype", name]) == 0
        assert f"activations {means}," in capsys.readouterr().out
    assert "reference_experts" in out and "triton_w4a16_experts is tested on H200" in out
    for more, word in (
        (["--why", "layers.0.mlp.expert"], "there is embed_tokens"),
        (["--gpu", "V100"], "known are"),
        (["--why", "lm_head", "--json"], "both given"),
        (["--tp", "5"], "5 ranks"),
        (["--kernel", "experts=marlin"], "triton_w4a16_experts"),
        (["--max-model-len", "999999999"], "max_model_len"),
        (["--gpu", "H200,mem=0.5"], "weights take"),
    ):
        assert main(["plan", folder, "--gpu", "H200", *more]) == 2, more
        assert word in capsys.readouterr().err, more


def test_nothing_is_planned_for_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--gpu", "cpu"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_the_attention_kernel_waits_where_it_cannot_read_the_cache(public: Callable[[str], Subject]) -> None:
    s = public("nvidia/Qwen3.6-35B-A3B-NVFP4")
    for kv, graphs in (("bf16", 16), ("fp8", 16), ("f32", 0)):
        made = make(s, kv_cache_dtype=kv)
        assert ("cuda_attention" in kernels(made, "attention")) == bool(graphs) and made.graphs == graphs
    assert make(s, enforce_eager=True).graphs == make(s, "cpu").graphs == make(s, layout=Layout(2)).graphs == 0
