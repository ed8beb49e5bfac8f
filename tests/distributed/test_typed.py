"""Sharding as types: right placements pass on every rank, and whatever is taken away, doubled or moved is caught."""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp4ward import cli
from fp4ward.errors import UserError
from fp4ward.facts import qwen3_5 as facts
from fp4ward.models import qwen3_5 as model
from fp4ward.parallel.placement import Experts, Layout, Placement, Replicate, Shard, Slot
from fp4ward.parallel.typed import check_sharding

pytest.importorskip("spmd_types")


def config(moe: bool, q: int, kv: int, keys: int, values: int) -> dict:
    """Head counts of a real model; the rest is made tiny anyway."""
    out = {
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "vocab_size": 512, "hidden_size": 2048, "num_hidden_layers": 4, "head_dim": 256,
        "num_attention_heads": q, "num_key_value_heads": kv, "linear_num_key_heads": keys,
        "linear_num_value_heads": values, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    if moe:
        sizes = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        return out | sizes | {"shared_expert_intermediate_size": 512}
    return out | {"intermediate_size": 17408}


MODELS = {
    "35B-A3B": config(True, 16, 2, 16, 32),
    "122B-A10B and 397B-A17B": config(True, 32, 2, 16, 64),
    "dense 9B": config(False, 16, 4, 16, 32),
}
MOE, DENSE = MODELS["35B-A3B"], MODELS["dense 9B"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_types(name, ranks):  # B32
    for rank in {0, ranks // 2, ranks - 1}:
        check_sharding(facts, model, MODELS[name], Layout(ranks), rank)
    assert not dist.is_initialized()


def test_heads_that_do_not_fit_the_ranks_are_refused():  # B34
    with pytest.raises(UserError, match="24 query heads and 4 KV heads cannot be cut over 16 ranks"):
        check_sharding(facts, model, config(False, 24, 4, 16, 48), Layout(16), 1)


def test_a_replicated_shared_expert_beside_sharded_experts_is_caught_by_name():  # B31
    """The founding fault: the model adds them as they are. Its sum of the experts is what keeps them apart."""
    with pytest.raises(UserError) as e:
        fault = mutant(CALLS.index("replicated(routed, self.kinds[0], self.tensor)"), "dropped")
        check_sharding(facts, fault, MOE, Layout(8), 3, replicate=["layers.*.mlp.shared_expert"])
    for says in ("8 ranks", "rank 3", "add of", "mlp.experts: P", "mlp.shared_expert.down_proj: R", "qwen3_5.py:"):
        assert says in str(e.value)
    assert not dist.is_initialized()


SUBSETS = [
    ["layers.*.mlp.shared_expert"], ["layers.*.mlp.experts"], ["layers.*.mlp.experts", "layers.*.mlp.shared_expert"],
    ["layers.*.linear_attn"], ["layers.3.self_attn", "layers.1.linear_attn", "layers.2.mlp.*"], ["lm_head"], ["*"],
]  # fmt: skip


@pytest.mark.parametrize("replicate", SUBSETS, ids=" ".join)
def test_any_subset_of_blocks_may_stay_whole(replicate):  # B30
    for layout in (Layout(4), Layout(4, 4), Layout(4, 2, 2)):
        check_sharding(facts, model, MOE, layout, 1, replicate=replicate)
    with pytest.raises(UserError, match="no such block"):
        check_sharding(facts, model, MOE, Layout(4), 1, replicate=["layers.9.*"])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2), Layout(4, 2), Layout(4, 4), Layout(2, 1, 2), Layout(4, 2, 2), Layout(4, 4, 4), Layout(16, 8, 4),
        Layout(8, 8), Layout(16, 16),
    ],
    ids=lambda x: f"tp{x.tp}-ep{x.ep}-adp{x.adp}",
)  # fmt: skip
def test_experts_dealt_to_ranks_and_groups_with_own_requests_type(layout):  # B8, B32
    for rank in {0, 1, layout.tp // 2, layout.tp - 1}:
        check_sharding(facts, model, MOE, layout, rank)


def test_a_dense_model_types_in_groups_with_own_requests():  # B32
    for rank in (0, 7):
        check_sharding(facts, model, DENSE, Layout(8, 1, 2), rank)


def test_tokens_that_are_not_gathered_are_caught_by_name():
    fault = mutant(CALLS.index("all_tokens(x_TH, self.groups)"), "dropped")
    with pytest.raises(UserError) as e:
        check_sharding(facts, fault, MOE, Layout(4, 2, 2), 3)
    for says in ("4 ranks", "rank 3", "layers.0.mlp.experts takes", "S(0) over groups", "R over groups is wanted"):
        assert says in str(e.value)


def test_default_mode_of_spmd_types_would_miss_it():
    """Why the global mode: in the default one a varying value takes a replicated one without complaint."""
    import spmd_types as spmd
    from spmd_types import checker
    from torch.distributed.device_mesh import init_device_mesh

    def block(local: bool) -> None:
        dist.init_process_group(backend="fake", rank=0, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
            group = mesh.get_group("tensor")
            hidden, down, shared = torch.zeros(5, 4), torch.zeros(4, 8), torch.zeros(5, 8)
            with spmd.set_current_mesh(mesh), checker.typecheck(local=local):
                spmd.assert_type(hidden, {group: spmd.V if local else spmd.S(1)})
                spmd.assert_type(down, {group: spmd.V if local else spmd.S(0)})
                spmd.assert_type(shared, {group: spmd.R})
                routed = hidden @ down  # a pending sum
                routed + shared
        finally:
            dist.destroy_process_group()

    block(local=True)
    with pytest.raises(spmd.SpmdTypeError):
        block(local=False)


def test_plan_checks_it_on_request(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    command = ["plan", str(tmp_path), "--gpu", "H200", "--check-sharding"]
    replicate = ["--replicate", "layers.*.self_attn", "--replicate", "layers.0.mlp.experts"]
    for more in ([], ["--ep", "2"], ["--ep", "4", "--adp", "2"], replicate):
        assert cli.main([*command, "--tp", "4", *more]) == 0
        told = capsys.readouterr().err
        assert "the forward types on 4 ranks" in told and "Warning" not in told
    assert cli.main(command) == 2
    assert "give --tp 2 or more" in capsys.readouterr().err


# --- mutants ---


def is_collective(node: ast.AST) -> bool:
    names = {"replicated", "all_tokens", "own_tokens"}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


class Mutation(ast.NodeTransformer):
    """Drops or doubles the `at`-th collective of a module."""

    def __init__(self, at: int = -1, how: str = "") -> None:
        self.at, self.how, self.calls = at, how, []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if is_collective(node):
            self.calls.append(ast.unparse(node))
            if len(self.calls) == self.at + 1:
                if self.how == "dropped":
                    return node.args[0]
                return ast.Call(node.func, [node, *node.args[1:]], node.keywords)
        return node


def mutant(at: int, how: str) -> types.ModuleType:
    path = Path(model.__file__)
    tree = Mutation(at, how).visit(ast.parse(path.read_text()))
    module = types.ModuleType("mutant")
    module.__file__ = str(path)
    with mock.patch.dict(sys.modules, {"mutant": module}):  # dataclasses look their module up
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), vars(module))
    return module


def calls() -> list[str]:
    """The collectives of the model, as written."""
    every = Mutation()
    every.visit(ast.parse(Path(model.__file__).read_text()))
    return every.calls


CALLS = calls()
# For those between experts and a shared expert of different kinds.
ASKED = {"replicated(routed": ["layers.*.mlp.shared_expert"], "replicated(shared": ["layers.*.mlp.experts"]}
GROUPED = Layout(4, 2, 2)
LAYOUTS = [Layout(4), Layout(4, 2), GROUPED]


def test_an_unchanged_copy_passes():
    check_sharding(facts, mutant(-1, "dropped"), MOE, Layout(4), 1)


@pytest.mark.parametrize("how", ["dropped", "doubled"])
@pytest.mark.parametrize("call", CALLS)
def test_a_dropped_or_doubled_collective_is_caught(call, how):  # B33
    # A dropped sum leaves P; a dropped gather leaves its shard where whole logits are promised.
    replicate = ASKED.get(call.partition(",")[0], [])
    for layout in [GROUPED] if "_tokens" in call else LAYOUTS:
        with pytest.raises(UserError):
            check_sharding(facts, mutant(CALLS.index(call), how), MOE, layout, 1, replicate=replicate)


def others(placement: Placement, slot: Slot) -> list[Placement]:
    """Every other kind of placement for a slot."""
    cuts: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(slot.shape)))]
    if slot.kind == "experts":
        cuts = [Replicate(), *(Experts(Shard(d)) for d in range(2)), Experts(Replicate())]

    def kind(p: Placement) -> object:
        inner = p.inner if isinstance(p, Experts) else p
        return type(p), type(inner), getattr(inner, "dim", None)

    return [c for c in cuts if kind(c) != kind(placement)]


def mutants(config_: dict) -> list[tuple[str, Placement]]:
    found = []
    for slot in facts.weights(facts.tiny(facts.parse(config_), 4)):
        if config_ is MOE or ".mlp." in slot.name:
            # A block of its own, the head, may be whole: that is another layout, not a fault.
            legal = [Replicate()] if slot.name == "lm_head" else []
            found += [(slot.name, p) for p in others(slot.placement, slot) if p not in legal]
    return found


@pytest.mark.parametrize(
    ("config_", "layout"), [(DENSE, Layout(4)), *((MOE, x) for x in LAYOUTS)], ids=["dense", "tp", "ep", "adp"]
)
def test_every_placement_changed_to_another_kind_is_caught(config_, layout):  # B33
    missed = []
    for name, placement in mutants(config_):

        def place(slot: Slot, name: str = name, placement: Placement = placement) -> Placement:
            return placement if slot.name == name else slot.placement

        try:
            check_sharding(facts, model, config_, layout, 1, place=place)
            missed.append(f"{name} -> {placement}")
        except UserError:
            pass
    assert missed == []
