"""The Qwen3.5 forward on real exporters' files: against stored logits, itself, and an independent oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4ward import LLM, SamplingParams
from tests.models.oracle import Oracle

FIXTURES = sorted((Path(__file__).parent.parent / "fixtures").glob("q35*"))
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(params=FIXTURES, ids=lambda f: f.name)
def folder(request) -> Path:
    return request.param


def reference(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "reference.safetensors")


def llm(folder: Path, dtype: str = "float32", kv: str = "f32", **kw) -> LLM:
    return LLM(str(folder), dtype=dtype, device="cpu", kv_cache_dtype=kv, show_progress=False, **kw)


def f64_logits(model: LLM, ids: list[int], chunks: list[int]) -> torch.Tensor:
    return model.engine.logits(ids, chunks)


@pytest.mark.parametrize("unpack", [True, False], ids=["unpacked", "packed"])
def test_float32_logits_and_greedy_tokens_equal_the_reference(folder, unpack, monkeypatch):
    if not unpack:
        monkeypatch.setattr("fp4ward.plan.UNPACK_BYTES", 0)
    ref = reference(folder)
    model = llm(folder)
    ids = ref["input_ids"][0].tolist()
    assert model.engine.runner.model.lm_head.op.weights[0].format.quantized == ("mixed" in folder.name and not unpack)
    logits = model.logits(ids)
    assert logits.dtype == torch.float32 and logits.shape == ref["logits"].shape
    assert (logits - ref["logits"]).abs().max() < 1e-3
    (out,) = model.generate([ids[:16]], GREEDY)
    assert ids[:16] + list(out.outputs[0].token_ids) == ref["greedy_from_16"][0].tolist()


def test_prefill_equals_chunked_prefill_equals_token_by_token(folder):
    ids = reference(folder)["input_ids"][0].tolist() * 4  # 160 tokens: three chunks of the delta rule, ten pages
    model = llm(folder, "float64", "f64", max_num_batched_tokens=4096)
    whole = f64_logits(model, ids, [len(ids)])
    for chunks in ([1] * len(ids), [64, 64, 32], [1, 2, 61, 65, 31], [127, 1, 32]):
        assert (f64_logits(model, ids, chunks) - whole).abs().max() < 1e-9


def generate_with_logits(folder: Path, prompts, params, **limits):
    """Outputs, and the float64 logits row behind every token of every prompt."""
    model = llm(folder, "float64", "f64", **limits)
    rows: dict[str, list[torch.Tensor]] = {}
    run = model.engine.runner.run

    def recording(work, every):
        logits = run(work, every)
        done = [w.request.request_id for w in work if w.request.computed + w.count == w.request.num_tokens]
        for name, row in zip(done, logits, strict=True):
            rows.setdefault(name, []).append(row)
        return logits

    model.engine.runner.run = recording
    outputs = model.generate(prompts, params)
    return [(o.outputs[0].token_ids, torch.stack(rows[o.request_id])) for o in outputs]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 6}, {"max_num_seqs": 3, "max_num_batched_tokens": 5}])
def test_alone_equals_in_a_batch(folder, limits):
    ref = reference(folder)["input_ids"][0].tolist()
    prompts = [ref[:n] for n in (1, 2, 7, 16, 17, 40)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = generate_with_logits(folder, prompts, params, **limits)
    for prompt, (tokens, logits) in zip(prompts, together, strict=True):
        ((alone, own),) = generate_with_logits(folder, [prompt], params)
        assert tokens == alone
        assert (logits - own).abs().max() < 1e-9


def test_preempted_sequences_give_the_same_tokens():
    folder = FIXTURES[-1]
    prompts = [reference(folder)["input_ids"][0].tolist()[:n] for n in (20, 21, 22, 23)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    free = [o.outputs[0].token_ids for o in llm(folder, "float64", "f64").generate(prompts, params)]
    model = llm(folder, "float64", "f64", max_model_len=64, kv_cache_memory_bytes=10 * 16384, block_size=8)
    pages = model.engine.scheduler.pages.size
    assert pages * 8 < sum(len(p) + 30 for p in prompts)  # they cannot all stay
    assert [o.outputs[0].token_ids for o in model.generate(prompts, params)] == free
    assert model.engine.scheduler.pages.free == pages


def e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("name", ["q35moe-nvfp4-w4a4-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"])
def test_fp8_cache_gives_the_tokens_of_an_oracle_that_quantizes_the_same_way(name):
    folder = Path(__file__).parent.parent / "fixtures" / name
    raw = load_file(folder / "model.safetensors")
    scales = {k.rsplit(".", 1)[1][0]: v.item() for k, v in raw.items() if k.endswith(("k_scale", "v_scale"))}
    ids = reference(folder)["input_ids"][0].tolist()[:16]
    oracle = Oracle(folder, kv=lambda i, kind, x: e4m3(x, scales.get(kind, 1.0)))
    for t in ids:
        logits = oracle.feed(t)
    want = []
    for _ in range(12):
        want.append(int(logits.argmax()))
        logits = oracle.feed(want[-1])
    model = llm(folder, "float64", "auto")
    assert model.config.kv_cache_dtype == "fp8"
    (out,) = model.generate([ids], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert list(out.outputs[0].token_ids) == want


def test_oracle_agrees_with_the_stored_logits(folder):
    ref = reference(folder)
    oracle = Oracle(folder)
    got = torch.stack([oracle.feed(t) for t in ref["input_ids"][0].tolist()])
    assert (got - ref["logits"]).abs().max() < 1e-3


def test_a_layer_without_kv_declaration_keeps_the_compute_type():  # B27
    folder = next(f for f in FIXTURES if f.name == "q35moe-w4a16-modelopt")
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] is None
    assert llm(folder, kv="auto").config.kv_cache_dtype == "f32"
