"""Loading: every tensor finds its place or is named, every layout gives the same bits, every cut is exact."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4ward import facts as facts_package
from fp4ward.checkpoint import load as load_module
from fp4ward.checkpoint.index import open_index
from fp4ward.checkpoint.load import Loaded, load, progress_bar
from fp4ward.errors import UserError
from fp4ward.facts import qwen3_5
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.weight import Weight
from fp4ward.parallel.placement import Experts, Layout, Replicate, Shard, Slot, ranges
from tests.build import FIXTURES, Checkpoint, Raw

Q35 = sorted(p.name for p in FIXTURES.glob("q35*"))
W4A4, W4A16 = "q35moe-nvfp4-w4a4-modelopt", "q35moe-w4a16-modelopt"
CT, MIXED, DENSE = "q35moe-nvfp4a16-ct", "q35moe-vl-mixed-w4a16-fp8-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
PREFIX = "model.language_model.layers"
STUB = SimpleNamespace(canonical=lambda n: n, LEFT_OUT={"visual": "not needed"}, kv_scale_layer=lambda m: None)


def load_folder(folder: Path, **options: Any) -> Loaded:
    index = open_index(folder)
    facts = facts_package.load(index.config)
    return load(index, facts.weights(facts.parse(index.config)), facts=facts, **options)


def load_stub(folder: Path, slots: list[Slot], **options: Any) -> Loaded:
    return load(open_index(folder), slots, facts=STUB, **options)


def fault(change: Callable[[Checkpoint], object], folder: Path, fixture: str = W4A16, **options: Any) -> str:
    """The one sentence that a changed fixture gives."""
    c = Checkpoint.of(fixture)
    change(c)
    with pytest.raises(UserError) as e:
        load_folder(c.save(folder), **options)
    assert "\n" not in str(e.value)
    return str(e.value)


def same(a: Loaded, b: Loaded) -> None:
    """Bit for bit."""
    assert a.tensors.keys() == b.tensors.keys() and a.formats == b.formats and a.kv_scales == b.kv_scales
    for name, x in a.tensors.items():
        ours, theirs = parts(x), parts(b.tensors[name])
        assert ours.keys() == theirs.keys(), name
        for part, p in ours.items():
            q = theirs[part]
            assert p.dtype == q.dtype and p.shape == q.shape, name
            assert torch.equal(p.contiguous().view(torch.uint8), q.contiguous().view(torch.uint8)), name


def parts(t: Weight | torch.Tensor) -> Mapping[str, torch.Tensor]:
    return t.parts if isinstance(t, Weight) else {"": t}


def weight(loaded: Loaded, name: str) -> Weight:
    w = loaded.tensors[name]
    assert isinstance(w, Weight)
    return w


def codes(loaded: Loaded) -> set[str]:
    return {n.code for n in loaded.notices}


def only_code(loaded: Loaded, code: str) -> Any:
    (notice,) = [n for n in loaded.notices if n.code == code]
    return notice


def stack_experts(c: Checkpoint, layer: str, *, suffix: str = ".", plain: bool = False) -> None:
    """Per-expert tensors of one layer as gate_up_proj and down_proj for all experts. Gate and up of an expert must
    share one global scale, which a stacked file stores once."""
    p = f"{layer}.mlp.experts"
    count = 1 + max(int(m[1]) for n in c.tensors if (m := re.match(re.escape(p) + r"\.(\d+)\.", n)))

    def take(e: int, proj: str, leaf: str) -> torch.Tensor:
        return c.tensors.pop(f"{p}.{e}.{proj}.{leaf}").torch()

    for leaf in ("weight",) if plain else ("weight", "weight_scale"):
        up = [torch.cat([take(e, "gate_proj", leaf), take(e, "up_proj", leaf)]) for e in range(count)]
        down = [take(e, "down_proj", leaf) for e in range(count)]
        for name, parts in (("gate_up_proj", up), ("down_proj", down)):
            end = suffix + leaf if not (leaf == "weight" and suffix == "_") else ""
            c.tensors[f"{p}.{name}{'' if plain else end}"] = Raw.of(torch.stack(parts))
    if not plain:
        for e in range(count):
            take(e, "up_proj", "weight_scale_2")
        for name, old in (("gate_up_proj", "gate_proj"), ("down_proj", "down_proj")):
            values = [float(take(e, old, "weight_scale_2")) for e in range(count)]
            c.tensors[f"{p}.{name}{suffix}weight_scale_2"] = Raw.f32(values)


def equal_globals(c: Checkpoint) -> Checkpoint:
    for name in list(c.tensors):
        if ".experts." in name and name.endswith("up_proj.weight_scale_2"):
            c.tensors[name] = c.tensors[name.replace("up_proj", "gate_proj")]
    return c


def dense_experts(c: Checkpoint) -> Checkpoint:
    """Experts in bf16, one by one."""
    for name in [n for n in c.tensors if ".experts." in n and n.endswith(".weight")]:
        t = c.tensors[name]
        for leaf in ("_scale", "_scale_2"):
            del c.tensors[name + leaf]
        n, half = t.shape
        g = torch.Generator().manual_seed(len(name) + half)
        c.tensors[name] = Raw.of(torch.randn(n, 2 * half, generator=g).bfloat16())
    return c


# ---- fixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", Q35)
def test_fixtures_load_and_every_byte_is_as_stored(fixture: str) -> None:  # B18 B23 B24 B28
    raw = Checkpoint.of(fixture).tensors
    loaded = load_folder(FIXTURES / fixture)
    prefix = "model." if fixture == CT else "model.language_model."
    for name, t in loaded.tensors.items():
        stem = name if name == "lm_head" else prefix + name
        if isinstance(t, torch.Tensor):
            assert t.dtype == torch.float32 and torch.equal(t, raw[stem].torch().float())
            continue
        experts = [(t, stem)]
        if len(t.shape) == 3:
            head, _, last = stem.rpartition(".")
            experts = [(t.expert(e), f"{head}.{e}.{last}") for e in range(t.shape[0])]
        for w, module in experts:
            stored = raw[f"{module}.weight" if f"{module}.weight" in raw else f"{module}.weight_packed"]
            assert w.parts[w.format.components[0]].contiguous().view(torch.uint8).numpy().tobytes() == stored.data
            if w.format.name == "nvfp4":
                scale = w.parts["block_scale"].contiguous().view(torch.uint8)
                assert scale.numpy().tobytes() == raw[f"{module}.weight_scale"].data
                name2 = "weight_global_scale" if fixture == CT else "weight_scale_2"
                g = raw[f"{module}.{name2}"].torch().reshape(())
                g = 1 / g if fixture == CT else g
                assert torch.equal(w.parts["global_scale"], g.expand(w.shape[0]))  # F19 B25: f32, one a row
            elif w.format.name == "fp8_tensor":
                assert torch.equal(w.parts["scale"], raw[f"{module}.weight_scale"].torch().expand(w.shape[0], 1))


@pytest.mark.parametrize("fixture", [MIXED, DENSE])
def test_vision_and_mtp_are_left_out_on_purpose_and_said(fixture: str) -> None:  # B24
    raw = Checkpoint.of(fixture).tensors
    loaded = load_folder(FIXTURES / fixture)
    for part, reason in qwen3_5.LEFT_OUT.items():
        mine = [t for n, t in raw.items() if n.startswith((f"model.{part}.", f"{part}."))]
        assert loaded.left_out[reason] == (len(mine), sum(len(t.data) for t in mine))
        assert any(n.code == "left-out" and n.where == part and reason in n.text for n in loaded.notices)


def test_loading_twice_gives_the_same(tmp_path: Path) -> None:  # B20
    same(load_folder(FIXTURES / MIXED), load_folder(FIXTURES / MIXED))


@pytest.mark.parametrize("fixture", Q35)
def test_sharded_with_and_without_index(tmp_path: Path, fixture: str) -> None:  # B28 F14
    whole = load_folder(FIXTURES / fixture)
    for i, index in enumerate((True, False)):
        same(whole, load_folder(Checkpoint.of(fixture).save(tmp_path / str(i), shards=4, index=index)))


def test_names_of_another_tool(tmp_path: Path) -> None:  # B23 F10
    c = Checkpoint.of(W4A16)
    c.rename(("model.language_model.", "model."))
    same(load_folder(FIXTURES / W4A16), load_folder(c.save(tmp_path)))


@pytest.mark.parametrize("suffix", [".", "_"])
def test_stacked_quantized_experts_are_the_same_model(tmp_path: Path, suffix: str) -> None:  # F14
    c = equal_globals(Checkpoint.of(W4A16))
    apart = load_folder(c.save(tmp_path / "apart"))
    for i in range(4):
        stack_experts(c, f"{PREFIX}.{i}", suffix=suffix)
    assert not any(".experts.0." in n for n in c.tensors)
    stacked = load_folder(c.save(tmp_path / "stacked"))
    same(apart, stacked)
    for rank in range(2):
        one, two = (load_folder(tmp_path / f, rank=rank, layout=Layout(2)) for f in ("apart", "stacked"))
        same(one, two)


def test_stacked_bf16_experts_are_the_same_model(tmp_path: Path) -> None:  # F14 F6
    c = dense_experts(Checkpoint.of(W4A16))
    apart = load_folder(c.save(tmp_path / "apart"))
    for i in range(4):
        stack_experts(c, f"{PREFIX}.{i}", plain=True)
    assert f"{PREFIX}.0.mlp.experts.gate_up_proj" in c.tensors
    same(apart, load_folder(c.save(tmp_path / "stacked")))
    assert apart.formats["layers.0.mlp.experts.gate_proj"].name == "bf16"


def test_dialects_give_the_same_multiplier(tmp_path: Path) -> None:  # F11 B18
    def one(leaf: str, value: Raw, packed: str) -> float:
        codes, scale = Raw.fill("U8", (2, 8)), Raw.fill("F8_E4M3", (2, 1), 0x38)
        c = Checkpoint({"config.json": {}}, {f"x.{packed}": codes, "x.weight_scale": scale, f"x.{leaf}": value})
        loaded = load_stub(c.save(tmp_path / leaf), [Slot("x", "linear", (2, 16), Replicate())])
        return float(weight(loaded, "x").parts["global_scale"][1])

    ct = one("weight_global_scale", Raw.f32([12343.1]), "weight_packed")
    modelopt = one("weight_scale_2", Raw.f32(8.1017e-5), "weight")
    assert f"{ct:.4e}" == f"{modelopt:.4e}" == "8.1017e-05"
    x = struct.unpack("f", struct.pack("f", 12343.1))[0]
    assert ct == struct.unpack("f", struct.pack("f", 1 / x))[0]  # the correctly rounded f32 reciprocal


def test_the_two_tools_describe_one_model_alike(tmp_path: Path) -> None:  # B18
    c = Checkpoint.of(W4A16)
    for name in [n for n in c.tensors if n.endswith("weight_scale_2")]:
        c.tensors[name] = Raw.f32(2.0**-12)  # its reciprocal is exact
    modelopt = load_folder(c.save(tmp_path / "modelopt"))
    for name in [n for n in c.tensors if n.endswith("weight_scale_2")]:
        del c.tensors[name]
        c.tensors[name.replace("weight_scale_2", "weight_global_scale")] = Raw.f32([2.0**12])
        stem = name.removesuffix("_scale_2")
        c.tensors[stem + "_packed"] = c.tensors.pop(stem)
    c.rename(("model.language_model.", "model."))
    del c.documents["hf_quant_config.json"]
    c.config["quantization_config"] = Checkpoint.of(CT).config["quantization_config"]
    same(modelopt, load_folder(c.save(tmp_path / "ct")))


def test_unequal_globals_stay_exact_per_row(tmp_path: Path) -> None:  # F17 F19 B25
    c = Checkpoint.of(W4A16)
    values = {f"mlp.experts.{e}.{p}": (3.85e-5 if p == "gate_proj" else 4.83e-5) * (e + 1)
              for e in range(8) for p in ("gate_proj", "up_proj")}  # fmt: skip
    for module, value in values.items():
        c.tensors[f"{PREFIX}.0.{module}.weight_scale_2"] = Raw.f32(value)
    loaded = load_folder(c.save(tmp_path))
    for module, value in values.items():
        _, _, e, proj = module.split(".")
        g = weight(loaded, f"layers.0.mlp.experts.{proj}").parts["global_scale"][int(e)]
        assert g.dtype == torch.float32 and torch.equal(g, torch.full((64,), value))


# ---- activations, cache, head ---------------------------------------------------------------------------------------


def test_activation_scales_are_dropped_and_said_once() -> None:  # B12
    loaded = load_folder(FIXTURES / W4A4)
    notice = only_code(loaded, "input-scale-dropped")
    assert "121 activation scales" in notice.text and notice.where == "nvfp4 W4A4"
    assert all("input" not in part for w in loaded.tensors.values() if isinstance(w, Weight) for part in w.parts)


def test_a_weight_only_label_with_activation_scales(tmp_path: Path) -> None:  # B16 F13
    c = Checkpoint.of(W4A16)
    for name in [n for n in c.tensors if n.endswith("weight_scale_2")]:
        c.tensors[name.replace("weight_scale_2", "input_scale")] = Raw.f32(0.25)
    loaded = load_folder(c.save(tmp_path))
    assert loaded.formats["layers.0.mlp.experts.up_proj"].label == "nvfp4 W4A16"
    assert only_code(loaded, "input-scale-dropped").where == "nvfp4 W4A16"


def test_kv_scales(tmp_path: Path) -> None:  # B27 F23
    c = Checkpoint.of(W4A4)
    k, v = (c.tensors[f"{PREFIX}.3.self_attn.{x}_proj.{x}_scale"].torch().item() for x in "kv")
    assert load_folder(FIXTURES / W4A4).kv_scales == {3: (k, v)}
    del c.tensors[f"{PREFIX}.3.self_attn.v_proj.v_scale"]
    one = load_folder(c.save(tmp_path / "one"))
    assert one.kv_scales == {3: (k, 1.0)} and "v_scale" in only_code(one, "kv-scale-one").text
    c.tensors[f"{PREFIX}.3.self_attn.v_scale"] = Raw.f32([0.5])  # where compressed-tensors stores it
    assert load_folder(c.save(tmp_path / "ct")).kv_scales == {3: (k, 0.5)}
    assert load_folder(FIXTURES / MIXED).kv_scales == {3: (1.0, 1.0)}
    assert only_code(load_folder(FIXTURES / MIXED), "kv-scale-unit")
    silent = load_folder(FIXTURES / W4A16)
    assert silent.kv_scales == {3: (1.0, 1.0)} and not any(c.startswith("kv-") for c in codes(silent))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_kv_scale_that_cannot_be(tmp_path: Path, value: float) -> None:  # B27
    name = f"{PREFIX}.3.self_attn.k_proj.k_scale"
    assert name in fault(lambda c: c.tensors.update({name: Raw.f32(value)}), tmp_path, W4A4)


def test_a_head_stored_quantized_though_excluded(tmp_path: Path) -> None:  # B21 F9
    c = Checkpoint.of(MIXED)
    for name in ("hf_quant_config.json", "config.json"):
        quantization = c.documents[name].get("quantization") or c.documents[name]["quantization_config"]
        quantization.get("quantized_layers", {}).pop("lm_head", None)
        for key in ("exclude_modules", "ignore"):
            if key in quantization:
                quantization[key] = [*quantization[key], "lm_head*"]
    c.tensors["lm_head.input_scale"] = Raw.f32(0.1)
    loaded = load_folder(c.save(tmp_path))
    assert loaded.formats["lm_head"].label == "nvfp4 W4A16"
    assert any(n.code == "stored-quantized" and n.where == "lm_head" for n in loaded.notices)


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:  # B28
    c = Checkpoint.of(W4A16)
    del c.tensors["lm_head.weight"]
    c.text_config["tie_word_embeddings"] = True
    folder = c.save(tmp_path)
    loaded = load_folder(folder)
    head, embedding = weight(loaded, "lm_head"), weight(loaded, "embed_tokens")
    assert head.parts["data"].data_ptr() == embedding.parts["data"].data_ptr() and head.shape == embedding.shape
    assert loaded.formats["lm_head"] == loaded.formats["embed_tokens"]
    parts = [weight(load_folder(folder, rank=r, layout=Layout(2)), "lm_head").parts["data"] for r in range(2)]
    assert torch.equal(torch.cat(parts), embedding.parts["data"])


def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    c = Checkpoint.of(W4A16)
    c.text_config["tie_word_embeddings"] = True
    loaded = load_folder(c.save(tmp_path))
    stored = c.tensors["lm_head.weight"].torch()
    assert torch.equal(weight(loaded, "lm_head").parts["data"], stored) and only_code(loaded, "untied-head")


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:  # B24
    assert "missing tensor lm_head.weight" in fault(lambda c: c.tensors.pop("lm_head.weight"), tmp_path)


# ---- a place without a tensor, a tensor without a place -------------------------------------------------------------

X = f"{PREFIX}.0"
NVFP4_PARTS = ("weight", "weight_scale", "weight_scale_2")


def drop(*names: str) -> Callable[[Checkpoint], object]:
    return lambda c: [c.tensors.pop(n) for n in names]


def put(**tensors: Raw) -> Callable[[Checkpoint], object]:
    return lambda c: c.tensors.update({n.replace("__", "."): t for n, t in tensors.items()})


def give(name: str, raw: Raw) -> Callable[[Checkpoint], object]:
    return lambda c: c.tensors.__setitem__(name, raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{X}.input_layernorm.weight"), ["missing tensor layers.0.input_layernorm.weight", "[128]"]),
        (drop(f"{X}.linear_attn.A_log"), ["missing tensor layers.0.linear_attn.A_log", "[4]"]),
        (drop(f"{X}.mlp.gate.weight"), ["missing tensor layers.0.mlp.gate.weight", "[8, 128]"]),
        (drop(f"{X}.linear_attn.in_proj_z.weight"), ["in_proj_z.weight_scale", "without its weight"]),
        (drop(f"{X}.linear_attn.in_proj_z.weight_scale"), ["in_proj_z.weight_scale is missing"]),
        (drop(f"{X}.linear_attn.in_proj_z.weight_scale_2"), ["in_proj_z.weight", "weight_scale_2"]),
        (drop(*(f"{X}.mlp.experts.5.up_proj.{p}" for p in NVFP4_PARTS)),
         ["missing tensor layers.0.mlp.experts.5.up_proj.weight", "[64, 128]"]),
        (give("model.language_model.layers.9.input_layernorm.weight", Raw.fill("BF16", (128,))),
         ["unexpected tensor model.language_model.layers.9.input_layernorm.weight"]),
        (give(f"{X}.mlp.experts.8.up_proj.weight", Raw.fill("BF16", (64, 128))),
         ["unexpected tensor", "experts.8.up_proj.weight"]),
        (give("something.else", Raw.f32(1.0)), ["unexpected tensor something.else"]),
        (give("word", Raw.f32(1.0)), ["unexpected tensor word"]),
        (give(f"{X}.mlp.gate.weird", Raw.f32(1.0)), [f"{X}.mlp.gate.weird"]),
        (give(f"{X}.linear_attn.in_proj_z.k_scale", Raw.f32(1.0)), ["in_proj_z.k_scale"]),
        (give(f"{PREFIX}.9.self_attn.k_scale", Raw.f32(1.0)), ["unexpected tensor", "layers.9.self_attn.k_scale"]),
        (give(f"{PREFIX}.3.self_attn.k_scale", Raw.f32([1.0, 2.0])), ["self_attn.k_scale", "one float"]),
        (give(f"{X}.input_layernorm.bias", Raw.fill("BF16", (128,))), ["unexpected tensor", "input_layernorm.bias"]),
        (give(f"{X}.linear_attn.in_proj_z.bias", Raw.fill("BF16", (128,))), ["in_proj_z.bias", "a bias"]),
        (give(f"{X}.mlp.experts.1.up_proj.bias", Raw.fill("BF16", (64,))), ["experts.1.up_proj.bias", "a bias"]),
        (give(f"{X}.linear_attn.out_proj.pre_quant_scale", Raw.fill("F32", (128,))), ["pre_quant_scale", "AWQ"]),
        (give(f"{X}.linear_attn.out_proj.svdquant_lora_a", Raw.fill("BF16", (8, 128))), ["lora_a", "SVDQuant"]),
        (give(f"{X}.mlp.experts.gate_up_proj", Raw.fill("BF16", (8, 128, 128))), ["one by one and stacked"]),
        (give(f"{X}.mlp.gate.weight", Raw.fill("BF16", (8, 64))), ["mlp.gate.weight", "[8, 64]", "[8, 128]"]),
        (give(f"{X}.linear_attn.A_log", Raw.fill("F32", (5,))), ["A_log", "[5]", "[4]"]),
        (give(f"{X}.linear_attn.A_log", Raw.fill("I64", (4,))), ["A_log", "I64"]),
        (give(f"{X}.mlp.gate.weight", Raw.fill("I32", (8, 128))), ["mlp.gate.weight", "I32"]),
        (give(f"{X}.linear_attn.in_proj_z.weight", Raw.fill("U8", (128, 63))), ["K=126", "multiple of 16"]),
        (give(f"{X}.linear_attn.in_proj_z.weight_scale", Raw.fill("F8_E4M3", (128, 4))), ["in_proj_z.weight_scale"]),
        (give(f"{X}.linear_attn.in_proj_z.weight_packed", Raw.fill("U8", (128, 64))), ["both"]),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Checkpoint], object], words: list[str]
) -> None:  # B24 B26 F8
    text = fault(change, tmp_path)
    assert all(w in text for w in words), text


def test_misshapen_experts_are_named(tmp_path: Path) -> None:
    def shrink(c: Checkpoint) -> None:
        p = f"{X}.mlp.experts.3.down_proj"
        c.tensors[f"{p}.weight"] = Raw.fill("U8", (128, 16))
        c.tensors[f"{p}.weight_scale"] = Raw.fill("F8_E4M3", (128, 2), 0x38)

    text = fault(shrink, tmp_path)
    assert "experts.3.down_proj.weight" in text and "[128, 32]" in text and "[128, 64]" in text


def test_a_misshapen_stack_is_named(tmp_path: Path) -> None:
    def change(c: Checkpoint) -> None:
        for name in [n for n in c.tensors if n.startswith(f"{X}.mlp.experts.")]:
            del c.tensors[name]
        c.tensors[f"{X}.mlp.experts.gate_up_proj"] = Raw.fill("BF16", (8, 256, 128))
        c.tensors[f"{X}.mlp.experts.down_proj"] = Raw.fill("BF16", (8, 128, 64))

    text = fault(change, tmp_path)
    assert "experts.gate_up_proj" in text and "[8, 256, 128]" in text and "[8, 128, 128]" in text


def test_experts_of_one_layer_in_two_formats(tmp_path: Path) -> None:  # F3 B11
    def change(c: Checkpoint) -> None:
        p = f"{X}.mlp.experts.1.up_proj"
        for leaf in NVFP4_PARTS:
            del c.tensors[f"{p}.{leaf}"]
        c.tensors[f"{p}.weight"] = Raw.fill("F8_E4M3", (64, 128), 0x38)
        c.tensors[f"{p}.weight_scale"] = Raw.f32(1.0)

    text = fault(change, tmp_path)
    assert "layers.0.mlp.experts" in text and "nvfp4" in text and "fp8_tensor" in text


def test_an_unused_query_scale_is_said(tmp_path: Path) -> None:
    c = Checkpoint.of(W4A4)
    c.tensors[f"{PREFIX}.3.self_attn.q_scale"] = Raw.f32([1.0])
    c.tensors[f"{PREFIX}.3.self_attn.o_proj.output_scale"] = Raw.f32(1.0)
    loaded = load_folder(c.save(tmp_path))
    assert {n.where for n in loaded.notices if n.code == "scale-unused"} == {"q_scale", "output_scale"}


def test_bf16_linear_attention_under_a_quantized_scheme(tmp_path: Path) -> None:  # F6 B22
    c = Checkpoint.of(CT)
    name = "model.layers.0.linear_attn.in_proj_z"
    for leaf in ("weight_packed", "weight_scale", "weight_global_scale"):
        del c.tensors[f"{name}.{leaf}"]
    c.tensors[f"{name}.weight"] = Raw.of(torch.randn(128, 128).bfloat16())
    loaded = load_folder(c.save(tmp_path))
    assert torch.equal(
        weight(loaded, "layers.0.linear_attn.in_proj_z").parts["data"], c.tensors[f"{name}.weight"].torch()
    )
    assert any(n.code == "stored-dense" and "in_proj_z" in n.where for n in loaded.notices)


def test_a_convolution_in_fp8(tmp_path: Path) -> None:
    c = Checkpoint.of(W4A16)
    name = f"{X}.linear_attn.conv1d.weight"
    data, scale = fp8.encode(c.tensors[name].torch().float().flatten(0, 1), "tensor")
    c.tensors[name] = Raw.of(data.view(256, 1, 4))
    c.tensors[name + "_scale"] = Raw.of(scale)
    whole = load_folder(c.save(tmp_path)).tensors["layers.0.linear_attn.conv1d.weight"]
    assert isinstance(whole, torch.Tensor) and torch.equal(whole, data.float().view(256, 1, 4) * scale)
    c.tensors[name] = c.tensors[name].put(5, 0x7F)
    assert "conv1d.weight" in fault(lambda d: d.tensors.update(c.tensors), tmp_path)


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81])
@pytest.mark.parametrize(("module", "at", "where", "rank"), [
    ("linear_attn.in_proj_z", 17 * 8 + 3, "[17, 3]", 0), ("linear_attn.in_proj_z", 127 * 8, "[127, 0]", 1),
    ("mlp.experts.2.down_proj", 127 * 4, "[127, 0]", 0),
])  # fmt: skip
def test_a_block_scale_that_cannot_be(
    tmp_path: Path, byte: int, module: str, at: int, where: str, rank: int
) -> None:  # F21: the index is the file's, whatever part of it a rank reads
    name = f"{X}.{module}.weight_scale"

    def change(c: Checkpoint) -> None:
        c.tensors[name] = c.tensors[name].put(at, byte)

    text = fault(change, tmp_path, rank=rank, layout=Layout(2))
    assert name in text and where in text


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("fixture", [W4A16, CT])
def test_a_global_scale_that_cannot_be(tmp_path: Path, fixture: str, value: float) -> None:  # B26
    layer, leaf = ("model.layers.0", "weight_global_scale") if fixture == CT else (X, "weight_scale_2")
    for module in ("linear_attn.in_proj_z", "mlp.experts.2.down_proj"):
        name = f"{layer}.{module}.{leaf}"
        shape = (1,) if fixture == CT else ()
        assert name in fault(give(name, Raw.f32([value], shape)), tmp_path, fixture)


@pytest.mark.parametrize(("fixture", "value"), [(W4A16, 0.0), (W4A16, 0.25), (CT, 0.0), (CT, math.inf), (CT, 0.25)])
def test_an_expert_that_was_never_used(tmp_path: Path, fixture: str, value: float) -> None:  # F22 B26
    layer, leaf = ("model.layers.0", "weight_global_scale") if fixture == CT else (X, "weight_scale_2")
    c = Checkpoint.of(fixture)
    p = f"{layer}.mlp.experts.2.down_proj"
    c.tensors[f"{p}.weight_scale"] = Raw.fill("F8_E4M3", (128, 4))
    c.tensors[f"{p}.{leaf}"] = Raw.f32([value], c.tensors[f"{p}.{leaf}"].shape)
    folder = c.save(tmp_path)
    for rank in range(2):
        w = weight(load_folder(folder, rank=rank, layout=Layout(2)), "layers.0.mlp.experts.down_proj")
        assert bool((w.expert(2).dense() == 0).all()) and bool((w.expert(1).dense() != 0).any())


def test_scales_at_both_ends_are_exact(tmp_path: Path) -> None:  # F18
    c = Checkpoint.of(W4A16)
    name = f"{X}.linear_attn.in_proj_z.weight_scale"
    c.tensors[name] = c.tensors[name].put(0, 0x7E).put(1, 0x01)
    w = weight(load_folder(c.save(tmp_path)), "layers.0.linear_attn.in_proj_z")
    assert w.parts["block_scale"][0, :2].float().tolist() == [448.0, 2.0**-9]


def test_fp8_values_that_cannot_be(tmp_path: Path) -> None:
    name = f"{X}.linear_attn.in_proj_z"

    def nan(c: Checkpoint) -> None:
        c.tensors[f"{name}.weight"] = c.tensors[f"{name}.weight"].put(127 * 128 + 2, 0xFF)

    text = fault(nan, tmp_path, MIXED, rank=1, layout=Layout(2))
    assert f"{name}.weight" in text and "[127, 2]" in text  # the file's index, though this rank has 64 rows
    for value in (-1.0, math.nan, math.inf, 0.0):
        assert f"{name}.weight_scale" in fault(give(f"{name}.weight_scale", Raw.f32(value)), tmp_path, MIXED)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = Checkpoint.of(W4A16).save(tmp_path)
    index = open_index(folder)
    with open(folder / "model.safetensors", "r+b") as f:
        f.truncate(500_000)
    with pytest.raises(UserError, match="the file ends inside tensor"):
        load(index, qwen3_5.weights(qwen3_5.parse(index.config)), facts=qwen3_5)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load(index, qwen3_5.weights(qwen3_5.parse(index.config)), facts=qwen3_5)


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fixture", [W4A16, MIXED, DENSE])
def test_ranks_hold_the_parts_of_the_whole(fixture: str, ranks: int) -> None:  # F25 B20 B34
    index = open_index(FIXTURES / fixture)
    cfg = qwen3_5.parse(index.config)
    slots = qwen3_5.weights(cfg)
    if ranks > 2:  # more ranks than key heads: the facts forbid it, so cut in units that allow it
        slots = [loosen(s) for s in slots]
    whole = load(index, slots, facts=qwen3_5)
    shares = [load(index, slots, facts=qwen3_5, rank=r, layout=Layout(ranks)) for r in range(ranks)]
    for slot in slots:
        full = dense(whole.tensors[slot.name])
        back = torch.full_like(full, math.nan)
        inner = slot.placement.inner if isinstance(slot.placement, Experts) else slot.placement
        for r, share in enumerate(shares):
            part = dense(share.tensors[slot.name])
            if isinstance(inner, Replicate):
                assert torch.equal(part, full)
                back = part
                continue
            dim = inner.dim + (1 if slot.kind == "experts" else 0)
            at = 0
            for start, stop in ranges(inner, full.shape[dim], r, ranks):
                back.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - at + at - start))
                at += stop - start
            assert at == part.shape[dim]
        assert torch.equal(back, full), slot.name
    assert {r for s in shares for r in s.formats} == set(whole.formats)


def loosen(slot: Slot) -> Slot:
    p = slot.placement
    if isinstance(p, Shard):
        unit = 1 if p.dim == 0 else 16
        p = Shard(p.dim, unit, tuple((size, unit) for size, _ in p.parts))
    return Slot(slot.name, slot.kind, slot.shape, p, slot.stacked, slot.optional)


def dense(t: Weight | torch.Tensor) -> torch.Tensor:
    return t.dense() if isinstance(t, Weight) else t


def stub_nvfp4(n: int, k: int, seed: int = 0) -> dict[str, Raw]:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    packed, block, g = nvfp4.encode(w)
    return {"x.weight": Raw.of(packed), "x.weight_scale": Raw.of(block), "x.weight_scale_2": Raw.of(g)}


@pytest.mark.parametrize(("n", "k", "dim", "unit", "ranks"), [
    (1856, 32, 0, 64, 8), (1856, 32, 0, 16, 8), (704, 32, 0, 16, 2), (160, 288, 1, 16, 4), (24832, 16, 0, 1, 6),
])  # fmt: skip
def test_uneven_shares_are_exact(tmp_path: Path, n: int, k: int, dim: int, unit: int, ranks: int) -> None:  # F25 B19
    folder = Checkpoint({"config.json": {}}, stub_nvfp4(n, k)).save(tmp_path)
    slot = Slot("x", "linear", (n, k), Shard(dim, unit))
    whole = weight(load_stub(folder, [slot]), "x").dense()
    parts = [weight(load_stub(folder, [slot], rank=r, layout=Layout(ranks)), "x").dense() for r in range(ranks)]
    assert torch.equal(torch.cat(parts, dim), whole)
    assert len({p.shape for p in parts}) <= 2


@pytest.mark.parametrize("scaling", ["tensor", "channel", "block", "block-4d", "bf16-channel"])
@pytest.mark.parametrize("dim", [0, 1])
def test_fp8_scales_of_every_kind_are_cut(tmp_path: Path, scaling: str, dim: int) -> None:
    w = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    data, scale = fp8.encode(w, scaling.replace("bf16-", "").replace("-4d", ""))
    if scaling == "block-4d":
        scale = scale.reshape(3, 1, 4, 1)
    if scaling == "bf16-channel":
        scale = scale.bfloat16()
    c = Checkpoint({"config.json": {}}, {"x.weight": Raw.of(data), "x.weight_scale": Raw.of(scale)})
    folder = c.save(tmp_path)
    slot = Slot("x", "linear", (300, 400), Shard(dim, 128 if dim and "block" in scaling else 50))
    whole = weight(load_stub(folder, [slot]), "x")
    assert torch.equal(whole.dense(), fp8.decode(data, scale))
    parts = [weight(load_stub(folder, [slot], rank=r, layout=Layout(3)), "x") for r in range(3)]
    assert torch.equal(torch.cat([p.dense() for p in parts], dim), whole.dense())


@pytest.mark.parametrize("scaling", ["tensor", "channel", "block"])
def test_stacked_fp8_experts(tmp_path: Path, scaling: str) -> None:  # F14
    w = torch.randn(3, 2 * 72, 256, generator=torch.Generator().manual_seed(2))
    w[1] = 0  # an unused expert
    data, scale = fp8.encode(w, scaling)
    if scaling != "channel":
        scale[1] = 0
    c = Checkpoint({"config.json": {}}, {"e.gate_up": Raw.of(data), "e.gate_up_weight_scale": Raw.of(scale)})
    folder = c.save(tmp_path)
    slots = [
        Slot(f"e.{name}", "experts", (3, 72, 256), Experts(Shard(0, 8)), ("e.gate_up", row))
        for name, row in (("gate", 0), ("up", 72))
    ]
    full = fp8.decode(data, scale)
    loaded = load_stub(folder, slots)
    assert torch.equal(weight(loaded, "e.gate").dense(), full[:, :72])
    assert torch.equal(weight(loaded, "e.up").dense(), full[:, 72:])
    shares = [weight(load_stub(folder, slots, rank=r, layout=Layout(2)), "e.up").dense() for r in range(2)]
    assert torch.equal(torch.cat(shares, 1), full[:, 72:])


def test_cuts_that_cannot_be_name_the_layer(tmp_path: Path) -> None:  # B34
    folder = Checkpoint({"config.json": {}}, stub_nvfp4(32, 48)).save(tmp_path)
    with pytest.raises(UserError, match=r"layer x: columns 0:24 on rank 0 of 2 cut through a block of 16"):
        load_stub(folder, [Slot("x", "linear", (32, 48), Shard(1, 8))], layout=Layout(2))
    with pytest.raises(UserError, match=r"layer x: 48 in units of 16 cannot be shared by 4 ranks"):
        load_stub(folder, [Slot("x", "linear", (32, 48), Shard(1, 16))], layout=Layout(4))


def test_rows_larger_than_the_buffer_and_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_folder(FIXTURES / MIXED)
    for size in (1, 1000, 4096):
        monkeypatch.setattr(load_module.Reader.__init__, "__defaults__", (size,))
        same(whole, load_folder(FIXTURES / MIXED))
        text = fault(give(f"{X}.linear_attn.in_proj_z.weight_scale", Raw.f32(math.nan)), tmp_path, MIXED)
        assert "in_proj_z.weight_scale" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fixture", Q35)
def test_a_gpu_gets_the_same_bytes(fixture: str) -> None:
    for rank in range(2):
        here = load_folder(FIXTURES / fixture, rank=rank, layout=Layout(2))
        there = load_folder(FIXTURES / fixture, rank=rank, layout=Layout(2), device="cuda")
        assert all(t.device.type == "cuda" for t in there.tensors.values())
        there.tensors = {name: t.to("cpu") for name, t in there.tensors.items()}
        same(here, there)


# ---- progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_progress_counts_the_bytes_of_this_rank(ranks: int) -> None:
    seen: list[tuple[int, int, str]] = []
    load_folder(FIXTURES / MIXED, layout=Layout(ranks), progress=lambda *call: seen.append(call))
    assert [d for d, _, _ in seen] == sorted(d for d, _, _ in seen)
    assert len({t for _, t, _ in seen}) == 1 and seen[-1][0] == seen[-1][1]
    index = open_index(FIXTURES / MIXED)
    text = sum(t.nbytes for n, t in index.tensors.items() if not n.startswith(("mtp", "model.visual")))
    assert seen[-1][1] <= text and seen[-1][1] > text / ranks * 0.99 - 1000


def test_the_bar_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as report:
        assert report is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar() as report:
        assert report is not None
        report(1 << 20, 2 << 20, "x")
    out = capsys.readouterr()
    assert out.out == "" and "MiB" in out.err
