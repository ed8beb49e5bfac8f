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
from fp4ward.parallel.placement import Experts, Placement, Replicate, Shard, Slot
from fp4ward.parallel.typed import check_sharding

pytest.importorskip("spmd_types")
pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_tensor:FutureWarning")


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
        check_sharding(facts, model, MODELS[name], ranks, rank)
    assert not dist.is_initialized()


def test_heads_that_do_not_fit_the_ranks_are_refused():  # B34
    with pytest.raises(UserError, match="24 query heads and 4 KV heads cannot be cut over 16 ranks"):
        check_sharding(facts, model, config(False, 24, 4, 16, 48), 16, 1)


def test_a_replicated_shared_expert_beside_sharded_experts_is_caught_by_name():  # B31
    """The founding fault: the model adds them as they are. Its first call of `replicated` is what keeps them apart."""
    with pytest.raises(UserError) as e:
        check_sharding(facts, mutant(0, "dropped"), MOE, 8, 3, replicate=["layers.*.mlp.shared_expert"])
    for says in ("8 ranks", "rank 3", "add of", "mlp.experts: P", "mlp.shared_expert.down_proj: R", "qwen3_5.py:"):
        assert says in str(e.value)
    assert not dist.is_initialized()


SUBSETS = [
    ["layers.*.mlp.shared_expert"], ["layers.*.mlp.experts"], ["layers.*.mlp.experts", "layers.*.mlp.shared_expert"],
    ["layers.*.linear_attn"], ["layers.3.self_attn", "layers.1.linear_attn", "layers.2.mlp.*"], ["lm_head"], ["*"],
]  # fmt: skip


@pytest.mark.parametrize("replicate", SUBSETS, ids=" ".join)
def test_any_subset_of_blocks_may_stay_whole(replicate):  # B30
    for ranks, ep in ((4, 1), (4, 4)):
        check_sharding(facts, model, MOE, ranks, 1, ep=ep, replicate=replicate)
    with pytest.raises(UserError, match="no such block"):
        check_sharding(facts, model, MOE, 4, 1, replicate=["layers.9.*"])


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_experts_dealt_to_ranks_type(ranks, ep):  # B8, B32
    for rank in range(ranks):
        check_sharding(facts, model, MOE, ranks, rank, ep=ep)


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
    for more in ([], ["--ep", "2"], ["--replicate", "layers.*.self_attn", "--replicate", "layers.0.mlp.experts"]):
        assert cli.main([*command, "--tp", "4", *more]) == 0
        assert "the forward types on 4 ranks" in capsys.readouterr().err
    assert cli.main([*command, "--tp", "4", "--adp", "2"]) == 2
    assert "no --adp" in capsys.readouterr().err
    assert cli.main(command) == 2
    assert "give --tp 2 or more" in capsys.readouterr().err


# --- mutants ---


class Mutation(ast.NodeTransformer):
    """Drops or doubles the `at`-th collective of a module."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.seen = at, how, -1

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "replicated":
            self.seen += 1
            if self.seen == self.at:
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


COLLECTIVES = sum(
    isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "replicated"
    for n in ast.walk(ast.parse(Path(model.__file__).read_text()))
)


def test_an_unchanged_copy_passes():
    check_sharding(facts, mutant(-1, "dropped"), MOE, 4, 1)


@pytest.mark.parametrize("how", ["dropped", "doubled"])
@pytest.mark.parametrize("at", range(COLLECTIVES))
def test_a_dropped_or_doubled_collective_is_caught(at, how):  # B33
    # A dropped sum leaves P; a dropped gather leaves its shard where whole logits are promised. The first two are for
    # experts beside a shared expert of another kind.
    replicate = [["layers.*.mlp.shared_expert"], ["layers.*.mlp.experts"], []][min(at, 2)]
    check_sharding(facts, model, MOE, 4, 1, replicate=replicate)
    with pytest.raises(UserError):
        check_sharding(facts, mutant(at, how), MOE, 4, 1, replicate=replicate)


def others(placement: Placement, slot: Slot) -> list[Placement]:
    """Every other kind of placement for a slot."""
    cuts: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(slot.shape)))]
    if slot.kind == "experts":
        cuts = [Replicate(), *(Experts(Shard(d)) for d in range(2)), Experts(Replicate())]

    def kind(p: Placement) -> object:
        inner = p.inner if isinstance(p, Experts) else p
        return type(p), type(inner), getattr(inner, "dim", None)

    return [c for c in cuts if kind(c) != kind(placement)]


def mutants() -> list[tuple[dict, str, Placement]]:
    found = []
    for config_ in (MOE, DENSE):
        for slot in facts.weights(facts.tiny(facts.parse(config_), 4)):
            if config_ is MOE or ".mlp." in slot.name:
                # A block of its own, the head, may be whole: that is another layout, not a fault.
                legal = [Replicate()] if slot.name == "lm_head" else []
                found += [(config_, slot.name, p) for p in others(slot.placement, slot) if p not in legal]
    return found


def test_every_placement_changed_to_another_kind_is_caught():  # B33
    missed = []
    for config_, name, placement in mutants():

        def place(slot: Slot, name: str = name, placement: Placement = placement) -> Placement:
            return placement if slot.name == name else slot.placement

        try:
            check_sharding(facts, model, config_, 4, 1, place=place)
            missed.append(f"{name} -> {placement}")
        except UserError:
            pass
    assert missed == []
