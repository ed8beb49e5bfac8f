"""Dummy weights: formats and shapes of the real checkpoint, numbers that a model runs on, tokens on all experts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4ward import LLM, SamplingParams, pieces
from fp4ward.checkpoint import dummy
from fp4ward.checkpoint import load as loading
from fp4ward.cli import main
from fp4ward.errors import UserError
from fp4ward.formats.formats import FORMATS
from fp4ward.formats.fp8 import check_data
from fp4ward.formats.nvfp4 import check_block_scale
from fp4ward.formats.weight import Weight, part_shapes
from fp4ward.kernels import experts
from fp4ward.layers.basic import GatedHeadNorm, RMSNorm
from fp4ward.parallel.placement import Replicate, Slot
from tests.build import FIXTURES

NAMES = sorted(f.name for f in FIXTURES.iterdir() if f.name.startswith("q35"))
CPU = torch.device("cpu")


def drawn(subject: pieces.Subject, seed: int = 0) -> dict[str, Weight | torch.Tensor]:
    neutral = subject.facts.neutral
    return dummy.load(
        subject.slots, subject.formats, subject.aliases, neutral=neutral, seed=seed, device=CPU
    ).tensors  # fmt: skip


def values(t: Weight | torch.Tensor) -> dict[str, torch.Tensor]:
    return {n: p.view(torch.uint8) for n, p in t.parts.items()} if isinstance(t, Weight) else {"": t}


def shapes(tensors: dict[str, Weight | torch.Tensor]) -> dict[str, Any]:
    return {
        name: (t.format, t.shape) if isinstance(t, Weight) else (t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }


def only_json(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A folder with a fixture's JSON alone."""
    for file in ("config.json", "hf_quant_config.json"):
        if (FIXTURES / name / file).exists():
            shutil.copy(FIXTURES / name / file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_formats_and_shapes_are_those_of_the_checkpoint_and_every_number_is_legal(name: str) -> None:
    s = pieces.read(FIXTURES / name, weights=True)
    assert s.index is not None
    real = loading.load(s.index, s.slots, facts=s.facts, assigned=s.assigned).tensors
    got = drawn(s)
    assert shapes(got) == shapes(real)
    for slot, t in got.items():
        if not isinstance(t, Weight):
            assert t.isfinite().all(), slot
            continue
        dense = t.dense()
        assert dense.isfinite().all() and dense.std() > 0, slot
        if t.format.name == "nvfp4":
            assert not check_block_scale(slot, t.parts["block_scale"]) and (t.parts["global_scale"] > 0).all()
        elif t.format.quantized:
            check_data(slot, t.parts["data"])
            assert (t.parts["scale"] > 0).all(), slot


@pytest.mark.parametrize("format", ["nvfp4", "fp8_tensor", "fp8_channel", "fp8_block", "bf16", "f16", "f32"])
def test_weights_are_normal_in_size_in_every_format(format: str) -> None:
    slot = Slot("x", "experts", (3, 160, 512), Replicate())
    found = dummy.load([slot], {"x": FORMATS[format]}, {}, neutral=lambda _: 1.0, seed=0, device=CPU).tensors["x"]
    assert isinstance(found, Weight)
    for e in range(3):  # each with scales of its own, 0.8 to 1.25 times what they would be
        assert found.expert(e).dense().std().item() == pytest.approx(512**-0.5, rel=0.27)
    scale = found.row_scale()
    if scale is not None:
        assert len(scale.unique()) == (480 if format == "fp8_channel" else 3)
    elif format == "fp8_block":
        assert len(found.parts["scale"].unique()) == 3 * 2 * 4
    if format == "nvfp4":  # as a quantizer of normal weights: the largest of 16 is far below that of all
        scales = found.parts["block_scale"].float()
        assert 60 < scales.min() < 120 < scales.median() < 190 < scales.max() < 448
        assert len(found.parts["packed"].unique()) == 256


def test_a_seed_says_it_all_and_slots_do_not_depend_on_each_other() -> None:
    s = pieces.read(FIXTURES / NAMES[-1])
    first, again, other = drawn(s), drawn(s), drawn(s, seed=1)
    for name, t in first.items():
        same = [torch.equal(a, b) for a, b in zip(values(t).values(), values(again[name]).values(), strict=True)]
        assert all(same), name
    name = "layers.1.mlp.experts.up_proj"
    assert not torch.equal(values(first[name])["packed"], values(other[name])["packed"])
    assert not torch.equal(values(first[name])["packed"], values(first[name.replace("up_", "gate_")])["packed"])
    (slot,) = (x for x in s.slots if x.name == name)
    alone = dummy.load([slot], s.formats, {}, neutral=s.facts.neutral, seed=0, device=CPU).tensors[name]
    assert all(torch.equal(a, b) for a, b in zip(values(alone).values(), values(first[name]).values(), strict=True))


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    s = pieces.read(only_json(tmp_path, NAMES[-1], tie_word_embeddings=True))
    got = drawn(s)
    assert s.aliases == {"lm_head": "embed_tokens"} and got["lm_head"] is got["embed_tokens"]


def test_a_full_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loading, "allocate", full)
    with pytest.raises(UserError, match=r"cpu has no room for layer embed_tokens: 0\.0 of 0\.0 GiB"):
        drawn(pieces.read(FIXTURES / NAMES[-1]))


# --- a model of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if "moe" not in n or "w4a4" in n or "mixed" in n])
def test_json_alone_runs_and_stays_finite(tmp_path: Path, name: str) -> None:
    llm = LLM(str(only_json(tmp_path, name)), device="cpu", load_format="dummy")
    assert llm.notices[-1].text.startswith("dummy weights") and llm.tokenizer is None
    ids = torch.randint(llm.engine.vocab_size, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    (answer,) = llm.generate([ids], params)
    logits = llm.logits(ids + answer.outputs[0].token_ids)
    assert len(answer.outputs[0].token_ids) == 50 and logits.isfinite().all()
    assert 0.5 < logits.std().item() < 2, "no layer runs away, none dies"


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_plan_is_that_of_the_real_weights(checkpoint: Callable[[str], Path], name: str) -> None:
    real, fake = (LLM(str(checkpoint(name)), device="cpu", load_format=f).plan for f in ("auto", "dummy"))
    assert (fake.layers, fake.memory, fake.unpacked) == (real.layers, real.memory, real.unpacked)
    assert [n for n in fake.notices if n not in real.notices] == [fake.subject.notices[-1]]


def test_norms_are_nearly_neutral_also_those_that_multiply_by_one_plus_w(tmp_path: Path) -> None:
    llm = LLM(str(only_json(tmp_path, NAMES[-1])), device="cpu", load_format="dummy")
    model: Any = llm.engine.runner.model
    blocks = [model.norm, *(b for x in model.layers for b in (x.norm, x.post_norm, *vars(x.mixer).values()))]
    norms = [b for b in blocks if isinstance(b, RMSNorm | GatedHeadNorm)]
    assert len(norms) == 1 + 4 * 2 + 3 + 2 and {type(n).__name__ for n in norms} > {"GatedHeadNorm", "HeadNorm"}
    for norm in norms:
        assert norm.weight.min() > 0.9 and norm.weight.max() < 1.1 and norm.weight.std() > 0


def test_the_router_spreads_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"hidden_size": 128, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8}
    folder = only_json(tmp_path, "q35moe-w4a16-modelopt", layer_types=None, **changes)
    llm = LLM(str(folder), device="cpu", load_format="dummy")
    chosen, route = [], experts.route

    def spy(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen.append(route(logits, top_k, **options)[1])
        return route(logits, top_k, **options)

    monkeypatch.setattr(experts, "route", spy)
    llm.logits(torch.randint(512, (400,), generator=torch.Generator().manual_seed(0)).tolist())
    assert len(chosen) == 8
    for ids in chosen:  # 50 tokens an expert
        load = torch.bincount(ids.flatten(), minlength=32)
        assert load.max() < 2.5 * 50 and load.min() > 50 / 5, load


@pytest.mark.parametrize("name", ["Qwen3.6-35B-A3B-NVFP4", "Qwen3.5-397B-A17B-NVFP4", "Qwen3.6-27B-NVFP4"])
def test_published_models_run_in_small_and_fit_on_paper(published: Path, tmp_path: Path, name: str) -> None:
    for file in ("config.json", "hf_quant_config.json"):
        shutil.copy(published / f"nvidia--{name}_{file}", tmp_path / file)
    s = pieces.read(tmp_path)
    sizes = {x.name: part_shapes(s.formats[x.name], x.shape) for x in s.slots if x.kind != "tensor"}
    total = sum(d.itemsize * math.prod(shape) for parts in sizes.values() for d, shape in parts.values())
    (planned,) = pieces.pieces(s, pieces.Layout()).weights
    plain = sum(8 * math.prod(x.shape) for x in s.slots if x.kind == "tensor")
    assert total + plain == planned, "dummy weights take what the plan counts"
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 4, "vocab_size": 256, "hidden_size": 128, "layer_types": text["layer_types"][:4]}
    text |= {"eos_token_id": 0, "bos_token_id": 0}
    text |= {key: 32 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in text}
    text |= {key: 64 for key in ("intermediate_size",) if key in text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), device="cpu", load_format="dummy", max_model_len=64)
    assert {f.name for f in llm.formats.values()} == {f.name for f in s.formats.values()}
    assert llm.logits(list(range(40))).isfinite().all()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_takes_token_ids_without_any_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(only_json(tmp_path, NAMES[-1]))
    ask = ["generate", folder, "--load-format", "dummy", "--device", "cpu"]
    assert main([*ask, "--prompt-token-ids", "1,2,3", "--max-tokens", "4"]) == 0
    found = capsys.readouterr()
    assert "dummy weights" in found.err and len(found.out.split(",")) == 4
    assert main(["generate", folder, "a text", *ask[2:]]) == 2
    assert "give token ids instead" in capsys.readouterr().err
    assert main([*ask[:3], "none", "--prompt-token-ids", "1"]) == 2
    assert "load_format='none': one of auto, safetensors, dummy is expected" in capsys.readouterr().err
    assert main(["generate", folder, "--prompt-token-ids", "1"]) == 2, "weights are still wanted otherwise"
