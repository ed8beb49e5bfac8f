"""Plans of random models on any machine, in any cut: legal or a sentence, sizes that respect units, costs that only
fall with faster machines and only rise with more work."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward import hardware, pieces, plan, plan_text
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.facts import PagedKv, nemotron_h, qwen3_5
from fp4ward.formats.formats import FORMATS, Format
from fp4ward.kernels.specs import SPECS, Batch, KernelSpec, estimate, no_kernel, unfit
from fp4ward.parallel.placement import Experts, Shard, ranges
from fp4ward.pieces import Layout, Subject, local_shape
from tests.unit.test_plan import ENGINE, FIXTURES

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def nemotrons(draw: Callable[[Any], Any]) -> Subject:
    """A Nemotron-H of random sizes and layers."""
    kv, groups, latent = draw(SIZES), draw(SIZES), draw(st.sampled_from([None, 64]))
    text = {
        "hidden_size": 128 * draw(SIZES), "vocab_size": 1000, "num_attention_heads": kv * draw(SIZES),
        "num_key_value_heads": kv, "head_dim": 32 * draw(SIZES), "n_groups": groups,
        "mamba_num_heads": groups * draw(SIZES), "mamba_head_dim": 16 * draw(SIZES), "ssm_state_size": 32,
        "n_routed_experts": 8 * draw(SIZES), "num_experts_per_tok": draw(SIZES), "moe_latent_size": latent,
        "moe_intermediate_size": 16 * draw(st.integers(1, 120)), "intermediate_size": 16 * draw(st.integers(1, 80)),
        "moe_shared_expert_intermediate_size": 16 * draw(st.integers(1, 120)), "dtype": "bfloat16",
        "hybrid_override_pattern": draw(st.text("ME*-", min_size=1, max_size=5)),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    return stored(draw, nemotron_h, nemotron_h.parse(text))


@st.composite
def subjects(draw: Callable[[Any], Any]) -> Subject:
    """A model of random sizes, each kind of layer in a random format."""
    moe = draw(st.booleans())
    kv, keys = draw(SIZES), draw(SIZES)
    text = {
        "hidden_size": 128 * draw(SIZES), "num_hidden_layers": draw(st.integers(1, 5)), "vocab_size": 1000,
        "num_attention_heads": kv * draw(SIZES), "num_key_value_heads": kv, "head_dim": 32 * draw(SIZES),
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(SIZES), "linear_key_head_dim": 32,
        "linear_value_head_dim": 16 * draw(SIZES), "num_experts": 8 * draw(SIZES), "num_experts_per_tok": draw(SIZES),
        "moe_intermediate_size": 16 * draw(st.integers(1, 20)), "shared_expert_intermediate_size": 16 * draw(SIZES),
        "intermediate_size": 16 * draw(st.integers(1, 80)), "dtype": "bfloat16",
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    cfg = qwen3_5.parse({"architectures": [f"Qwen3_5{'Moe' if moe else ''}ForCausalLM"], **text})
    return stored(draw, qwen3_5, cfg)


def stored(draw: Callable[[Any], Any], facts: ModuleType, cfg: Any) -> Subject:
    slots = tuple(facts.weights(cfg))
    kinds: dict[str, Format] = {}
    formats = {}
    for slot in slots:
        if slot.kind != "tensor":
            kind = slot.name.rpartition(".")[2]
            possible = [f for f in FORMATS.values() if slot.shape[-1] % 16 == 0 or f.name != "nvfp4"]
            if kind not in kinds:
                kinds[kind] = draw(st.sampled_from(possible)).with_activation(draw(st.sampled_from(["none", "nvfp4"])))
            formats[slot.name] = kinds[kind]
    aliases = {s.name: slots[0].name for s in slots if s.optional}
    return Subject("random", facts, cfg, slots, formats, aliases, draw(st.sampled_from([None, "fp8"])), True)


ANY = subjects() | nemotrons()
LAYOUTS = st.sampled_from([1, 2, 3, 4, 6, 8, 16]).flatmap(
    lambda tp: st.builds(
        Layout, st.just(tp), *(st.sampled_from([n for n in (1, 2, 3, 4, 8) if tp % n == 0]) for _ in range(2))
    )
)


@given(ANY, st.sampled_from(hardware.ROWS), LAYOUTS, st.sampled_from(["auto", "float16", "float32"]))
@settings(deadline=None, derandomize=True, max_examples=120)
def test_every_layer_has_a_legal_kernel_or_a_sentence(
    s: Subject, hw: hardware.Hardware, layout: Layout, dtype: str
) -> None:
    try:
        made = plan.make(s, hw, plan.Options(EngineConfig(model="x", dtype=dtype, max_model_len=64), layout))
    except UserError as e:
        assert "\n" not in str(e) and ("layer " in str(e) or "heads" in str(e))
        return
    assert {p.layer.path for p in made.layers if p.layer.op in ("linear", "embedding")} == {
        n.name for n in s.slots if n.kind == "linear"
    }
    mixers = sum(p.layer.op in ("attention", "gated_delta", "mamba2") for p in made.layers)
    assert mixers == sum(kind not in ("moe", "mlp") for kind in s.cfg.layer_types)
    for p in made.layers:
        assert len(p.choice.picks) == len(made.regimes)
        for pick in p.choice.picks:
            assert pick.kernel == no_kernel(p.layer.op) or unfit(pick.kernel, p.layer, hw, made.config.dtype) is None
            assert 0 < pick.cost.floor_us <= pick.cost.us < math.inf or pick.cost.floor_us == 0
    assert plan_text.render(made) and json.dumps(plan_text.record(made), allow_nan=False)
    assert plan_text.why(made, made.layers[-1].layer.path)


@given(ANY, LAYOUTS)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_local_sizes_respect_units_and_make_the_whole(s: Subject, layout: Layout) -> None:
    for slot in s.slots:  # B34, F25
        form = s.formats.get(slot.name)
        try:
            each = [local_shape(slot, form, layout, r, False) for r in range(layout.tp)]
        except UserError as e:
            assert slot.name in str(e)
            continue
        assert all(0 < n <= whole for local in each for n, whole in zip(local, slot.shape, strict=True))
        p = slot.placement
        ranks, inner = layout.attention, p
        if isinstance(p, Experts):
            ranks, inner = layout.tp // layout.ep, p.inner
            dealt = sum(each[g * ranks][0] for g in range(layout.ep))
            assert dealt == slot.shape[0]
            for g in range(layout.ep):  # a group's ranks are neighbours and hold pieces of the same experts
                assert len({local[0] for local in each[g * ranks : (g + 1) * ranks]}) == 1
        if isinstance(inner, Shard) and not inner.parts:
            at = inner.dim + (slot.kind == "experts")
            sizes = [local[at] for local in each[:ranks]]
            assert all(n % inner.unit == 0 or n == slot.shape[at] % inner.unit for n in sizes[:-1])
            assert inner.on_short == "replicate" or sum(sizes) == slot.shape[at]
            if form is not None and at == len(slot.shape) - 1:
                assert all(n % form.column_unit == 0 for n in sizes[:-1])


@given(
    ANY, st.sampled_from(SPECS), st.sampled_from(hardware.ROWS), st.floats(1.0, 16.0), st.integers(1, 5000),
    st.integers(0, 10000),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=150)
def test_more_bandwidth_never_raises_an_estimate(
    s: Subject, spec: KernelSpec, hw: hardware.Hardware, factor: float, tokens: int, context: int
) -> None:
    faster = dataclasses.replace(hw, bandwidth=hw.bandwidth * factor)
    batch = Batch(tokens, max(1, tokens // 3), context, 2, 1)
    for layer in pieces.pieces(s, Layout()).layers:
        if layer.op == spec.op:
            a, b = estimate(spec, layer, hw, batch), estimate(spec, layer, faster, batch)
            assert b.us <= a.us and b.floor_us <= a.floor_us and a.floor_us <= a.us * 1.001


@given(
    ANY, st.sampled_from(SPECS), st.sampled_from(hardware.ROWS), st.integers(1, 5000), st.integers(0, 500),
    st.sampled_from([0, 16, 1024]), st.sampled_from([0, 16, 1024]),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=150)
def test_more_work_never_lowers_an_estimate(
    s: Subject, spec: KernelSpec, hw: hardware.Hardware, tokens: int, more: int, rows: int, columns: int
) -> None:
    for layer in pieces.pieces(s, Layout()).layers:
        if layer.op == spec.op:
            *held, n, k = layer.local[0]
            wider = dataclasses.replace(layer, local=((*held, n + rows, k + columns),))
            a, b = (estimate(spec, x, hw, Batch(t, 1, 0, 2, 1)) for x, t in ((layer, tokens), (wider, tokens + more)))
            assert a.us <= b.us * (1 + 1e-9) and a.floor_us <= b.floor_us * (1 + 1e-9)


@given(ANY, st.sampled_from([h for h in hardware.ROWS if not h.cpu]), st.sampled_from(SPECS))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_forced_kernel_that_cannot_run_raises(s: Subject, hw: hardware.Hardware, spec: KernelSpec) -> None:
    options = plan.Options(dataclasses.replace(ENGINE, kernel=(f"{spec.op}={spec.name}",)))
    layers = [x for x in pieces.pieces(s, Layout()).layers if x.op == spec.op]
    concerned = [x for x in layers if all(f.name in spec.formats for f in x.formats)]
    any_tokens = spec.tokens[1] >= EngineConfig(model="x").max_num_batched_tokens
    if concerned and any_tokens and all(unfit(spec, x, hw, "bfloat16") is None for x in concerned):
        made = plan.make(s, hw, options)
        chosen = {p.layer.path: p.choice.picks for p in made.layers}
        assert all(pick.kernel == spec for x in concerned for pick in chosen[x.path])
    else:
        with pytest.raises(UserError, match=spec.name):
            plan.make(s, hw, options)


@given(SIZES, SIZES, st.integers(1, 16))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_query_heads_find_their_kv_head_on_every_rank(kv: int, group: int, ranks: int) -> None:
    base = json.loads((Path(__file__).parent.parent / "fixtures" / FIXTURES[0] / "config.json").read_text())
    text = base.get("text_config", base)
    text |= {"num_attention_heads": kv * group, "num_key_value_heads": kv}
    cfg = qwen3_5.parse(base | text | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    slots = {s.name: s for s in qwen3_5.weights(cfg)}
    d = cfg.head_dim

    def heads(name: str, rank: int, unit: int) -> range:  # the heads whose rows this rank's projection holds
        p = slots[f"layers.0.self_attn.{name}"]
        assert isinstance(p.placement, Shard)
        (span,) = ranges(p.placement, p.shape[0], rank, ranks)
        return range(span[0] // unit, span[1] // unit)

    for rank in range(ranks):
        if kv * group < ranks:
            return
        queries, held = heads("q_proj", rank, 2 * d), heads("k_proj", rank, d)
        share, odd = divmod(len(queries), len(held))
        local = None if odd else [held[i // share] for i in range(len(queries))]
        try:
            (spec,) = qwen3_5.state_spec(cfg, rank, ranks)
        except UserError as e:
            assert "query heads" in str(e) and local != [q // group for q in queries]
            return
        assert isinstance(spec, PagedKv) and spec.heads == len(held)
        assert local == [q // group for q in queries]  # F26: what attention will read is what it should
