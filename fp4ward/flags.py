"""The flags of the command `fp4ward`, named as vLLM's where the meaning is the same. cli.py reads them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any, NoReturn

from fp4ward import __version__
from fp4ward.config import DTYPES, KV_DTYPES, LOAD_FORMATS, EngineConfig, parse_size
from fp4ward.errors import UserError

LEVELS = ("debug", "info", "warning", "error")
ENGINE = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name not in ("model", "seed"))
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n",
)  # fmt: skip
TASKS = ("arithmetic", "recall", "sorting", "copying", "choice")  # of fp4ward.evals, which takes longer to import
CHAT_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence instead of a page of usage; flags are not completed from their first letters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (`{self.prog} --help` lists what there is)")


def parser() -> argparse.ArgumentParser:
    """The parser; a namespace it gives has `command`, and None (or nothing) for what was not given."""
    top = _Parser(prog="fp4ward", description="Runs NVFP4 checkpoints of hybrid mixture-of-experts models.")
    top.add_argument("--version", action="version", version=f"fp4ward {__version__}")
    _log_level(top, "info")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    _model(generate)
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", help="text; from stdin if left out or -")
    generate.add_argument("--prompt-token-ids", metavar="IDS", type=_token_ids, help="such as 1,2,3, instead of text")
    generate.add_argument("--json", action="store_true", help="one JSON object with tokens, usage and timings")
    sampling = _sampling_flags(generate)
    sampling.add_argument("-n", type=int, metavar="N", help="number of answers")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="N best tokens a position (with --json)")
    sampling.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for the prompt (with --json)")
    _engine_flags(generate)

    chat = commands.add_parser("chat", help="talk to a model", description=f"Talk to a model. {CHAT_HELP}")
    _model(chat)
    chat.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")
    chat.add_argument("--no-thinking", action="store_true", help="short for enable_thinking false in the next one")
    chat.add_argument("--chat-template-kwargs", metavar="JSON", type=_json_object, help="variables for the template")
    _sampling_flags(chat)
    _engine_flags(chat)

    evaluate = commands.add_parser(
        "eval",
        help="measure a model on tasks with exact answers",
        description="Ask a model seeded held-out questions, greedily and with thinking off, and count the right "
        "answers. 64 sequences run at once unless --max-num-seqs says otherwise.",
    )
    _model(evaluate)
    evaluate.add_argument("--tasks", metavar="LIST", help=f"families such as {','.join(TASKS[:2])}, or all (all)")
    evaluate.add_argument("--count", type=int, metavar="N", help="questions a family (120 to 400, by family)")
    evaluate.add_argument("--quick", action="store_true", help="48 questions a family, and only arithmetic by default")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="of the questions (0)")
    evaluate.add_argument("--instructions", action="store_true", help="tell the answer's form; not needed by the demo")
    evaluate.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (by family)")
    evaluate.add_argument("--json", action="store_true", help="everything as JSON, each question's answer included")
    evaluate.add_argument("--save", metavar="FILE", help="write the same JSON to a file")
    evaluate.add_argument("--compare", metavar="FILE", help="paired difference from a run saved there")
    evaluate.add_argument("--plot", metavar="FILE", help="bar chart (.png, .svg, .pdf); needs matplotlib")
    _engine_flags(evaluate)

    plan = commands.add_parser(
        "plan",
        help="what would run, how fast, and whether it fits",
        description="Decide on paper, without a GPU or weights, which kernel runs each layer of a checkpoint on a "
        "machine, why, what it costs and what memory remains. config.json and hf_quant_config.json are enough.",
    )
    _model(plan)
    plan.add_argument("--gpu", metavar="NAME", help="H200, RTX-5090, cpu, ... or sm=90,mem=141,bw=4800,bf16=989 (here)")
    plan.add_argument("--tp", type=int, default=1, metavar="N", help="ranks in all (1)")
    plan.add_argument("--ep", type=int, default=1, metavar="N", help="groups of ranks that share out the experts (1)")
    plan.add_argument("--adp", type=int, default=1, metavar="N", help="groups that attend to their own requests (1)")
    plan.add_argument(
        "--replicate", action="append", default=[], metavar="PATTERN",
        help="keep blocks whole on every rank, such as 'layers.*.mlp.shared_expert'; may be repeated",
    )  # fmt: skip
    plan.add_argument("--why", metavar="LAYER", help="everything about one operation, such as layers.0.mlp.experts")
    plan.add_argument(
        "--check-sharding", action="store_true",
        help="also run the forward on tiny tensors as three of the --tp ranks and check every value's sharding type",
    )  # fmt: skip
    plan.add_argument("--html", metavar="FILE", help="also write it as a page to look at")
    plan.add_argument("--json", action="store_true", help="everything as JSON")
    _engine_flags(plan, without=("--device", "--load-format"))

    lint = commands.add_parser(
        "lint",
        help="whether a checkpoint is healthy",
        description="Hold a checkpoint's headers and JSON against each other and against the model, and list all that "
        "is wrong, not only the first. Exit code 2 if there are errors, 0 with warnings alone.",
    )
    _model(lint)
    lint.add_argument("--scales", action="store_true", help="also read all scales and codes, in little memory")
    lint.add_argument("--json", action="store_true", help="everything as JSON, findings one by one")
    lint.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hugging Face name")

    warm = commands.add_parser(
        "warm",
        help="compile the CUDA kernels before they are needed",
        description="Compile every CUDA kernel for a GPU, here or not, into a cache: the folder FP4WARD_CACHE, else "
        "fp4ward in XDG_CACHE_HOME or ~/.cache. Needs no GPU, but NVRTC (the cuda extra). A model that uses one "
        "starts without compiling it; `plan` says what a model uses. Triton's kernels still compile at first use.",
    )
    warm.add_argument("--gpu", metavar="NAME", help="such as H200, RTX-5090 or sm=90 (the one here)")

    env = commands.add_parser("env", help="versions and hardware", description="Versions and hardware, for reports.")
    env.add_argument("--json", action="store_true", help="as JSON")
    for command in (generate, chat, evaluate, plan, lint, warm, env):
        _log_level(command, argparse.SUPPRESS)
    return top


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, Hugging Face name, or demo (the model in this package)")


def _log_level(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"{', '.join(LEVELS)}: info shows notices and timings, debug all notices and traces (info)"
    parser.add_argument("--log-level", choices=LEVELS, default=default, metavar="LEVEL", help=text)


def _sampling_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("sampling", "Defaults come from the checkpoint's generation_config.json.")

    def add(flag: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    add("--temperature", float, "T", "0 takes the most likely token")
    add("--top-p", float, "P", "only the likeliest tokens that sum to P")
    add("--top-k", int, "K", "only the K likeliest tokens; 0 or -1 for all")
    add("--min-p", float, "P", "only tokens with P times the best one's probability")
    add("--repetition-penalty", float, "R", "above 1 discourages tokens of prompt and answer")
    add("--presence-penalty", float, "R", "taken from the logit of tokens in the answer")
    add("--frequency-penalty", float, "R", "the same, once for each occurrence")
    add("--seed", int, "N", "makes a random answer repeatable")
    add("--stop-token-ids", _token_ids, "IDS", "tokens that end the answer, such as 1,2")
    add("--max-tokens", int, "N", "longest answer (until the model ends it, or the context is full)")
    add("--min-tokens", int, "N", "no end before this many tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after an end token")
    return group


def _engine_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    group = parser.add_argument_group("engine")
    default = {f.name: f.default for f in dataclasses.fields(EngineConfig)}

    def add(flag: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        if flag in without:
            return
        value = default[flag[2:].replace("-", "_")]
        shown = "" if value is None else f" ({value})"
        group.add_argument(flag, type=kind, metavar=metavar, help=text + shown)

    add("--dtype", _dtype, "TYPE", f"of the computation: auto, {', '.join(DTYPES)}")
    add("--device", str, "DEVICE", "auto, cpu, cuda or cuda:N")
    add("--kv-cache-dtype", str, "TYPE", f"auto, {', '.join(dict.fromkeys(KV_DTYPES.values()))}")
    add("--max-model-len", int, "N", "tokens of prompt and answer together (the model's)")
    add("--max-num-seqs", int, "N", "sequences at once")
    add("--max-num-batched-tokens", int, "N", "tokens a step; longer prompts go in chunks")
    add("--block-size", int, "N", "tokens of a page of the KV cache")
    add("--kv-cache-memory-bytes", _size, "SIZE", "such as 4GiB (what the sequences need)")
    add("--load-format", str, "FORMAT", f"{', '.join(LOAD_FORMATS)}: random, config.json is enough")
    add("--revision", str, "NAME", "branch, tag or commit of a Hugging Face name")
    group.add_argument("--enforce-eager", action="store_const", const=True, help="no CUDA graphs")
    group.add_argument(
        "--kernel", action="append", metavar="OP=NAME[,NAME]", help="allow these kernels only; may be repeated"
    )


def _token_ids(text: str) -> list[int]:
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not all(p.isascii() and p.isdigit() and len(p) < 12 for p in parts):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no list of token ids such as 1,2,3")
    return [int(p) for p in parts]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no JSON object such as '{{\"enable_thinking\": false}}'")
    return value


def _dtype(text: str) -> str:
    """Of DTYPES, also as bf16, f16, fp16 or half: short names are those of a KV cache's type."""
    name = {KV_DTYPES[d]: d for d in DTYPES}.get("f16" if text == "half" else text.replace("fp", "f"), text)
    if name not in ("auto", *DTYPES):
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: one of {', '.join(('auto', *DTYPES))} is expected")
    return name


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
