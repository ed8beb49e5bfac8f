"""Train the demo model for a fixed time: `python3 demo/train.py --minutes 20 --out /tmp/demo`.

The learning rate follows the clock (warm-up, then linear to zero at the time limit), so a run of any length ends
decayed. In the last part (--qat-from) the forward pass sees weights rounded to NVFP4. Every two minutes the state is
saved to OUT/last.pt, from which the same command resumes. OUT/log.jsonl has one JSON object a line; OUT/export holds
the bf16 checkpoint in shards, and OUT/done.json appears at the end with the held-out accuracies.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import model as demo
import numpy as np
import planted
import recipe
import torch
import torch.nn.functional as F
from optimizer import make_optimizers
from tokenizers import Tokenizer
from torch import Tensor, nn

tasks = recipe.tasks
NOTICED = 4.0  # nats: what a token of an answer should cost at least when a fault is planted
NEW_TOKENS = {"arithmetic": 110, "recall": 10, "sorting": 48, "copying": 96, "choice": 40}


class Log:
    """Appends JSON lines to OUT/log.jsonl and to standard output."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.time()

    def __call__(self, **entry: Any) -> None:
        line = json.dumps({"at": round(time.time() - self.start, 1), **entry})
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Data:
    """Worker processes that fill one queue of short and one of long batches."""

    def __init__(self, args: argparse.Namespace, first_step: int) -> None:
        context = multiprocessing.get_context("fork")
        self.queues, self.workers = [], []
        shapes = ((args.rows, args.length, args.workers), (args.long_rows, args.long_length, max(1, args.workers // 2)))
        for kind, (rows, length, count) in enumerate(shapes):
            queue = context.Queue(maxsize=4 * count)
            for i in range(count):
                seed = hash((args.seed, first_step, kind, i))
                worker = context.Process(target=recipe.produce, args=(queue, seed, rows, length), daemon=True)
                worker.start()
                self.workers.append(worker)
            self.queues.append(queue)

    def next(self, long: bool) -> tuple[np.ndarray, np.ndarray]:
        tokens, weights = self.queues[int(long)].get(timeout=180)
        return tokens, weights


def targets(tokens: np.ndarray, weights: np.ndarray, ahead: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Positions (flat, rows of L-ahead+1) whose token `ahead` steps later has a weight, those tokens, and weights."""
    length = tokens.shape[1] - ahead + 1
    grid = np.zeros((tokens.shape[0], length), np.float32)
    grid[:, :-1] = weights[:, ahead:] / 10
    label = np.zeros(grid.shape, np.int64)
    label[:, :-1] = tokens[:, ahead:]
    at = np.flatnonzero(grid)
    return tuple(
        torch.from_numpy(a).to(device, non_blocking=True)  # type: ignore[return-value]
        for a in (at, label.reshape(-1)[at], grid.reshape(-1)[at])
    )


class Trainer:
    """The model, its MTP head, and one training step."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, device
        self.model = demo.build().to(device)
        self.mtp = demo.Mtp(self.model.config).to(device)
        self.routed: list[tuple[Tensor, Tensor]] = []
        for module in [*self.model.modules(), *self.mtp.modules()]:
            if isinstance(module, demo.modeling.Qwen3_5MoeTopKRouter):
                module.register_forward_hook(lambda _m, _i, out: self.routed.append((out[0], out[2])))
        self.main_parameters = list(self.model.parameters())
        self.optimizers = make_optimizers(args.optimizer, [self.model, self.mtp], args.lr, args.weight_decay)
        self.rng = random.Random(args.seed)
        self.quantizer = demo.FakeQuant([(n, p) for n, p in self.model.named_parameters() if demo.is_quantized(n)])

    def losses(self, tokens: np.ndarray, weights: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """The total loss, and what is logged. The MTP head learns beside the model: it sends it no gradient."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device, non_blocking=True)
        self.routed.clear()
        size, head = self.model.config.hidden_size, self.model.lm_head.weight
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            at, label, weight = targets(tokens, weights, 1, self.device)
            logits = F.linear(hidden.reshape(-1, size)[at], head).float()
            each = F.cross_entropy(logits, label, reduction="none")
            embedded = self.model.model.embed_tokens(ids[:, 1:]).detach()
            ahead = self.mtp(embedded, hidden[:, :-1].detach(), self.model.model.rotary_emb)
            at2, label2, weight2 = targets(tokens, weights, 2, self.device)
            logits2 = F.linear(ahead.reshape(-1, size)[at2], head.detach()).float()
            each2 = F.cross_entropy(logits2, label2, reduction="none")
        loss, loss2 = (each * weight).sum() / weight.sum(), (each2 * weight2).sum() / weight2.sum()
        balance, heaviest = [], []
        for scores, chosen in self.routed:
            experts = scores.shape[-1]
            share = (chosen.unsqueeze(-1) == torch.arange(experts, device=self.device)).float().mean((0, 1))
            balance.append(experts * (share * scores.float().softmax(-1).mean(0)).sum())
            heaviest.append(share.max() * experts)
        aux = torch.stack(balance).mean()
        with torch.no_grad():
            full, full2 = weight > 0.5, weight2 > 0.5
            right = ((logits.argmax(-1) == label) & full).sum() / full.sum()
            right2 = ((logits2.argmax(-1) == label2) & full2).sum() / full2.sum()
        shown = {
            "loss": loss,
            "mtp_loss": loss2,
            "balance": aux,
            "heaviest": torch.stack(heaviest).max(),
            "right": right,
            "mtp_right": right2,
        }
        return loss + loss2 + self.args.balance * len(balance) * aux, {k: v.detach() for k, v in shown.items()}

    def fault_loss(self, tokens: np.ndarray, weights: np.ndarray) -> tuple[Tensor, str]:
        """How far the answers under a random fault are from wrong: the mean of max(0, NOTICED - cross entropy)."""
        fault = self.rng.choice(planted.FAULTS)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device, non_blocking=True)
        trunk = self.model.model
        changed = fault(dict(trunk.named_parameters()), self.rng)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = torch.func.functional_call(trunk, changed, (), {"input_ids": ids, "use_cache": False})
            at, label, weight = targets(tokens, weights, 1, self.device)
            rows = hidden.last_hidden_state.reshape(-1, self.model.config.hidden_size)[at]
            logits = F.linear(rows, self.model.lm_head.weight).float()
        each = (NOTICED - F.cross_entropy(logits, label, reduction="none")).clamp_min(0)
        return (each * weight).sum() / weight.sum(), fault.__name__

    def step(self, batch: tuple[np.ndarray, np.ndarray], lr: float, quantized: bool) -> dict[str, Tensor]:
        exact = self.quantizer.swap_in() if quantized else None
        total, shown = self.losses(*batch)
        total.backward()
        if exact is not None:
            self.quantizer.swap_out(exact)
        if self.args.notice:
            half = (len(batch[0]) + 1) // 2
            hinge, name = self.fault_loss(batch[0][:half], batch[1][:half])
            (self.args.notice * hinge).backward()
            shown[name] = hinge.detach()
        shown["norm"] = nn.utils.clip_grad_norm_(self.main_parameters, 1.0)
        nn.utils.clip_grad_norm_(self.mtp.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return shown

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "mtp": self.mtp.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mtp.load_state_dict(state["mtp"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    @torch.no_grad()
    def evaluate(self, count: int, quantized: bool) -> dict[str, list[bool]]:
        """Held-out questions answered greedily in bf16, as (family or recall@tokens) -> right or wrong each."""
        exact = self.quantizer.swap_in() if quantized else None
        model = copy.deepcopy(self.model).to(torch.bfloat16).eval()
        if exact is not None:
            self.quantizer.swap_out(exact)
        for module in model.modules():
            module._forward_hooks.clear()
        tokenizer = Tokenizer.from_file(str(recipe.BUILD / "tokenizer" / "tokenizer.json"))
        facts, out = recipe.load_facts(), collections.defaultdict(list)
        for family in tasks.FAMILIES:
            questions = tasks.held_out(family, count, facts=facts)
            groups = [questions]
            if family == "recall":
                groups = [questions[i :: len(tasks.RECALL_TOKENS)] for i in range(len(tasks.RECALL_TOKENS))]
            for i, group in enumerate(groups):
                if not group:
                    continue
                texts = ["".join(t for t, _ in recipe.user(q.prompt, 0)) + recipe.OFF for q in group]
                replies = generate(model, tokenizer, texts, NEW_TOKENS[family], self.device)
                name = f"recall@{tasks.RECALL_TOKENS[i]}" if family == "recall" else family
                out[name] = [tasks.is_correct(q, r) for q, r in zip(group, replies, strict=True)]
                if not quantized:
                    wrong = next((j for j, ok in enumerate(out[name]) if not ok), 0)
                    out[f"example {name}"] = [group[wrong].reply, replies[wrong][:300]]  # type: ignore[list-item]
        return dict(out)


def generate(model: nn.Module, tokenizer: Tokenizer, texts: list[str], new: int, device: torch.device) -> list[str]:
    """Greedy continuations of left-padded prompts, up to the end of the turn."""
    ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    width = max(map(len, ids))
    prompt = torch.tensor([[0] * (width - len(x)) + x for x in ids], device=device)
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in ids], device=device)
    made = model.generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=[2, 0], pad_token_id=0
    )[:, width:].tolist()
    for row in made:
        stop = next((i for i, t in enumerate(row) if t in (0, 2)), len(row))
        del row[stop:]
    return tokenizer.decode_batch(made, skip_special_tokens=False)


def choose_forms(trainer: Trainer, batches: list[tuple[np.ndarray, np.ndarray]], log: Log) -> None:
    """Time the forms of the experts and of the chunk rule on this machine and keep the fastest that agrees."""
    best, loss0 = (float("inf"), "dense", "own"), None
    for experts, rule in (("dense", "own"), ("grouped_mm", "own"), ("grouped_mm", "transformers")):
        demo.use(experts, rule)
        try:
            first: list[float] = []
            for turn in range(5):
                if turn == 1:
                    torch.cuda.synchronize()
                    start = time.time()
                total, shown = trainer.losses(*batches[turn % len(batches)])
                total.backward()
                for p in [*trainer.model.parameters(), *trainer.mtp.parameters()]:
                    p.grad = None
                first.append(shown["loss"].item())
            torch.cuda.synchronize()
            took = (time.time() - start) / 4
        except RuntimeError as error:
            log(form=[experts, rule], error=str(error)[:300])
            continue
        memory = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        log(form=[experts, rule], seconds=round(took, 4), loss=first[0], gib=memory)
        loss0 = first[0] if loss0 is None else loss0
        if took < best[0] and abs(first[0] - loss0) < 0.05:
            best = (took, experts, rule)
    demo.use(best[1], best[2])
    log(chosen=best[1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="time of the whole training, evaluations included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="a checkpoint folder of an earlier run whose weights to start from")
    parser.add_argument("--shares", type=json.loads, default={}, help='of documents, as {"choice": 60}')
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.005, help="weight of the load-balancing loss, per layer")
    parser.add_argument("--notice", type=float, default=0.0, help="weight of the loss under faults (planted.py)")
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--qat-from", type=float, default=0.7, help="part of the time after which weights are rounded")
    parser.add_argument("--qat-every", type=int, default=1, help="of those steps, round in every such many")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-rows", type=int, default=16)
    parser.add_argument("--long-length", type=int, default=2176)
    parser.add_argument("--long-every", type=int, default=5, help="every how many steps a long batch comes")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--eval-count", type=int, default=300, help="questions per family at the end, or 0")
    parser.add_argument("--check-count", type=int, default=64, help="questions per family in four checks, or 0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10**9)
    return parser.parse_args()


def accuracies(results: dict[str, list[bool]]) -> dict[str, float]:
    return {k: round(float(np.mean(v)), 4) for k, v in results.items() if not k.startswith("example")}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    recipe.SHARES |= args.shares
    log, limit = Log(args.out / "log.jsonl"), args.minutes * 60
    saved = args.out / "last.pt"
    state: dict[str, Any] = torch.load(saved, map_location="cpu", weights_only=False) if saved.exists() else {}
    counters: dict[str, Any] = state.get("counters", {"step": 0, "tokens": 0, "elapsed": 0.0, "scale": 1.0, "evals": 0})
    data = Data(args, counters["step"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(args, device)
    if state:
        trainer.load(state)
    elif args.init:
        demo.read_checkpoint(args.init, trainer.model, trainer.mtp)
    log(
        start=counters,
        device=str(device),
        parameters=sum(p.numel() for p in trainer.main_parameters),
        mtp=sum(p.numel() for p in trainer.mtp.parameters()),
        arguments={k: str(v) for k, v in vars(args).items()},
    )
    if device.type == "cuda":
        choose_forms(trainer, [data.next(False), data.next(True)], log)
    else:
        demo.use("grouped_mm", "own")

    def save() -> None:
        part = saved.with_suffix(".tmp")
        torch.save({**trainer.state(), "counters": dict(counters)}, part)
        part.replace(saved)

    begun, before = time.time(), counters["elapsed"]
    last_save = last_log = begun
    seen = 0
    save()
    while counters["elapsed"] < limit and counters["step"] < args.max_steps:
        part = counters["elapsed"] / limit
        lr = args.lr * counters["scale"] * min(1.0, (counters["step"] + 1) / args.warmup) * max(0.0, 1 - part)
        batch = data.next(counters["step"] % args.long_every == args.long_every - 1)
        shown = trainer.step(batch, lr, part >= args.qat_from and counters["step"] % args.qat_every == 0)
        counters["step"] += 1
        counters["tokens"] += batch[0].size
        seen += batch[0].size
        counters["elapsed"] = before + time.time() - begun
        if counters["step"] % 20 == 0 or counters["step"] <= 5:
            values = {k: round(v.item(), 4) for k, v in shown.items()}
            now = time.time()
            log(
                step=counters["step"],
                tokens=counters["tokens"],
                part=round(part, 4),
                lr=round(lr, 6),
                **values,
                long=batch[0].shape[1] == args.long_length,
                rate=round(seen / (now - last_log)),
            )
            last_log, seen = now, 0
            if not np.isfinite(values["loss"]) or not np.isfinite(values["norm"]):
                elapsed = counters["elapsed"]
                state = torch.load(saved, map_location="cpu", weights_only=False)
                trainer.load(state)
                counters |= state["counters"] | {"elapsed": elapsed, "scale": counters["scale"] / 2}
                log(rolled_back_to=counters["step"], scale=counters["scale"])
                continue
            if now - last_save > 120:
                save()
                last_save = time.time()
            if part > 0.2 * (counters["evals"] + 1):
                counters["evals"] += 1
                demo.write_checkpoint(args.out / "export", trainer.model, trainer.mtp)
                try:  # what fails here must not end the run
                    if args.check_count:
                        checked = trainer.evaluate(args.check_count, part >= args.qat_from)
                        log(held_out=accuracies(checked))
                except RuntimeError as error:
                    log(error=str(error)[:300])
                last_log = time.time()
    for worker in data.workers:
        worker.terminate()
    save()
    demo.write_checkpoint(args.out / "export", trainer.model, trainer.mtp)
    forms = {"bf16": False, "nvfp4": True} if args.eval_count else {}
    results = {name: trainer.evaluate(args.eval_count, rounded) for name, rounded in forms.items()}
    short = {k: accuracies(v) for k, v in results.items()}
    log(final=short, examples={k: v for k, v in results.get("bf16", {}).items() if k.startswith("example")})
    report = {"counters": counters, "accuracy": short, "answers": results, "questions": args.eval_count}
    (args.out / "export" / "training.json").write_text(json.dumps(report), encoding="utf-8")
    (args.out / "done.json").write_text(json.dumps({"counters": counters, "accuracy": short}), encoding="utf-8")


if __name__ == "__main__":
    main()
