"""The command `fp4ward`: the only reader of the command line and the environment.

Exit codes: 0 done, 1 a fault of fp4ward itself, 2 something is wrong with what the user gave (also a checkpoint where
`lint` finds errors; for warnings it is 0), 130 interrupted, 141 the reader of the output went away. Text and JSON go to
stdout; notices, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4ward import __version__, flags
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError, one_line

if TYPE_CHECKING:
    from types import ModuleType

    from fp4ward.llm import LLM
    from fp4ward.parallel.placement import Layout
    from fp4ward.runtime.request import RequestOutput, SamplingParams

log = logging.getLogger("fp4ward")
# A terminal acts on control characters, and what a model writes is not to be acted on.
CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if c not in b"\t\n"}
EVAL_SEQS = 64  # many short questions: on a CPU about two thirds of the time that 16 at once take
NOTICES_SHOWN = 8  # more only with --log-level debug: real checkpoints have one notice a kind, some a dozen kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. argv: without the program's name, None takes the process's."""
    given = list(sys.argv[1:] if argv is None else argv)
    level = "info"
    try:
        args = flags.parser().parse_args(given)
        level = args.log_level
        with _logging_to_stderr(level):
            code: int = COMMANDS[args.command](args)
            sys.stdout.flush()
            return code
    except UserError as e:
        if level == "debug":
            traceback.print_exc()
        return _fail(f"error: {e}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        _drop_unwritable_output()
        return 141
    except OSError as e:  # no room for the output, say
        _drop_unwritable_output()
        if level == "debug":
            traceback.print_exc()
        return _fail(f"error: {one_line(e)}", 2)
    except Exception as e:
        if level == "debug":
            traceback.print_exc()
        what = " ".join(f"{type(e).__name__}: {e}".split())[:500]
        return _fail(
            f"internal error: {what} (--log-level debug shows the trace; please report it with `fp4ward env`)", 1
        )


def _drop_unwritable_output() -> None:
    """What stdout still holds and cannot write: Python would try again at exit, complain, and end with code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    print(f"fp4ward: {message}", file=sys.stderr)
    return code


# --- generate ---------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    sampling = _sampling(args)
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise UserError("--logprobs and --prompt-logprobs are part of the JSON output; add --json")
    llm, load_s = _load(args, text=isinstance(prompt, str) or "stop" in sampling, chat=False)
    timer = _Timer(llm.stream(prompt, _with_defaults(llm, sampling)))
    if args.json:
        output = _last(timer)
        print(json.dumps(_report(args.model, output, load_s, timer), ensure_ascii=False, allow_nan=False))
        return _outcome(output)
    if (sampling.get("n") or 1) == 1:
        output = _write_stream(llm, timer)
    else:  # several answers cannot share one terminal while they grow
        output = _last(timer)
        for completion in output.outputs:
            print(f"[{completion.index}] {_shown(completion.text) if llm.tokenizer else _ids(completion.token_ids)}")
    reasons = ", ".join(dict.fromkeys(str(c.finish_reason) for c in output.outputs))
    log.info(
        "%d prompt tokens, %d new, finished by %s; %s",
        len(output.prompt_token_ids), timer.tokens, reasons, timer.summary(),
    )  # fmt: skip
    return _outcome(output)


def _outcome(output: RequestOutput) -> int:
    """The exit code: a request that the model itself failed (logits that are not numbers) is no success."""
    failed = [c.error for c in output.outputs if c.error is not None]
    return _fail(f"error: {failed[0]}", 1) if failed else 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt from the command line or stdin, as text or token ids."""
    if args.prompt_token_ids is not None:
        if args.prompt is not None:
            raise UserError("a prompt and --prompt-token-ids were both given; give one")
        if not args.prompt_token_ids:
            raise UserError("--prompt-token-ids is empty; at least one token is needed")
        ids: list[int] = args.prompt_token_ids
        return ids
    if args.prompt in (None, "-"):
        if sys.stdin is not None and sys.stdin.isatty():
            print("Prompt (Ctrl-D on an empty line ends it):", file=sys.stderr)
        text = _decode(sys.stdin.buffer.read() if sys.stdin is not None else b"")
        text = text.removesuffix("\n").removesuffix("\r")  # the line end of `echo` and here-documents
        where = "stdin"
    else:
        text, where = args.prompt, "the command line"
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt on the command line is not valid UTF-8") from None
    if not text:
        raise UserError(f"the prompt from {where} is empty; give some text, or --prompt-token-ids")
    return text


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"the prompt on stdin is not valid UTF-8 (byte {e.start})") from None


def _last(snapshots: Iterable[RequestOutput]) -> RequestOutput:
    return deque(snapshots, maxlen=1).pop()


def _write_stream(llm: LLM, snapshots: Iterable[RequestOutput]) -> RequestOutput:
    """Print the first answer as it grows: text, or token ids where there is no tokenizer. The last snapshot."""
    done = 0
    try:
        for output in snapshots:
            completion = output.outputs[0]
            if llm.tokenizer is not None:
                sys.stdout.write(_shown(completion.text[done:]))
                done = len(completion.text)
            else:
                fresh = completion.token_ids[done:]
                sys.stdout.write(("," if done and fresh else "") + _ids(fresh))
                done += len(fresh)
            sys.stdout.flush()
    finally:
        print()
    return output


def _shown(text: str) -> str:
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _report(model: str, output: RequestOutput, load_s: float, timer: _Timer) -> dict[str, Any]:
    """What --json prints. Log-probabilities appear where they were asked for; one that is not finite is null."""
    outputs = []
    for c in output.outputs:
        entry: dict[str, Any] = {
            "index": c.index,
            "text": c.text,
            "token_ids": list(c.token_ids),
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
        }
        if c.error is not None:
            entry["error"] = c.error
        if c.logprobs is not None:
            entry |= {"logprobs": _plain(c.logprobs), "cumulative_logprob": _plain(c.cumulative_logprob)}
        outputs.append(entry)
    new = sum(len(c.token_ids) for c in output.outputs)
    ids = list(output.prompt_token_ids)
    report: dict[str, Any] = {"model": model, "prompt": output.prompt, "prompt_token_ids": ids}
    if output.prompt_logprobs is not None:
        report["prompt_logprobs"] = _plain(output.prompt_logprobs)
    report["outputs"] = outputs
    report["usage"] = {"prompt_tokens": len(ids), "completion_tokens": new, "total_tokens": len(ids) + new}
    report["timings"] = {"load_s": round(load_s, 4), **timer.json()}
    return report


def _plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class _Timer:
    """Passes snapshots on and takes the time: TTFT to the first token, TPOT between those of the longest answer."""

    def __init__(self, snapshots: Iterator[RequestOutput]) -> None:
        self._snapshots = snapshots
        self.tokens = self._longest = self._first_tokens = 0
        self.ttft: float | None = None
        self.total = 0.0

    def __iter__(self) -> Iterator[RequestOutput]:
        start = time.perf_counter()
        for output in self._snapshots:
            counts = [len(c.token_ids) for c in output.outputs]
            self.total = time.perf_counter() - start
            if self.ttft is None and any(counts):
                self.ttft, self._first_tokens = self.total, max(counts)
            self.tokens, self._longest = sum(counts), max(counts, default=0)
            yield output

    @property
    def tpot(self) -> float | None:
        steps = self._longest - self._first_tokens
        return None if self.ttft is None or steps <= 0 else (self.total - self.ttft) / steps

    def json(self) -> dict[str, float | None]:
        values = {"ttft_s": self.ttft, "tpot_s": self.tpot, "total_s": self.total}
        return {name: None if value is None else round(value, 6) for name, value in values.items()}

    def summary(self) -> str:
        ttft = "no token" if self.ttft is None else f"TTFT {self.ttft:.3f} s"
        return ttft if self.tpot is None else f"{ttft}, TPOT {1000 * self.tpot:.1f} ms"


# --- chat -------------------------------------------------------------------------------------------------------------


def _chat(args: argparse.Namespace) -> int:
    kwargs = dict(args.chat_template_kwargs or {})
    if args.no_thinking:
        kwargs["enable_thinking"] = False
    sampling = _sampling(args)
    llm, _ = _load(args, text=True, chat=True)
    params = _with_defaults(llm, sampling)
    opening = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages = list(opening)
    if sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history in input())
        print(flags.CHAT_HELP, file=sys.stderr)
    while True:
        line = _chat_line()
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(opening)
            print("Started over.", file=sys.stderr)
        elif line.startswith("/"):
            print(f"There is no command {line.split()[0]}. {flags.CHAT_HELP}", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _chat_turn(llm, messages, params, kwargs)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _chat_line() -> str | None:
    """The next line the user typed, None at the end of the input."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    data = sys.stdin.buffer.readline()
    return _decode(data).strip() if data else None


def _chat_turn(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, kwargs: dict[str, Any]) -> str | None:
    """Stream one answer to stdout. What was said is kept when the user stops it; None when nothing could be said."""
    said = ""

    def kept() -> Iterator[RequestOutput]:
        nonlocal said
        for output in timer:
            said = output.outputs[0].text
            yield output

    stream: Iterator[RequestOutput] | None = None
    try:
        stream = llm.stream_chat(messages, params, chat_template_kwargs=kwargs)
        timer = _Timer(stream)
        output = _write_stream(llm, kept())
    except UserError as e:  # too long, say: the conversation goes on
        print(f"fp4ward: {e} (/reset starts over)", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        return said or None
    finally:
        if isinstance(stream, Generator):
            stream.close()  # frees the request's cache when it was stopped
    log.debug("%d tokens; %s", timer.tokens, timer.summary())
    return None if _outcome(output) else said


# --- eval -------------------------------------------------------------------------------------------------------------


def _eval(args: argparse.Namespace) -> int:
    from fp4ward.evals import report, run

    if args.max_tokens is not None and args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: a whole number above 0 is expected")
    wanted = ",".join(flags.TASKS) if args.tasks == "all" else args.tasks  # --quick --tasks all: all of them, quickly
    families = [] if wanted is None else [name.strip() for name in wanted.split(",")]
    # What can be refused is, before minutes of answers.
    questions = run.plan(families, args.count, args.quick, args.seed)
    other = None if args.compare is None else run.read(args.compare, questions, args.instructions)
    _check_writable(args.save, args.plot)
    if args.plot is not None:
        report.check_plot(args.plot)
    if args.max_num_seqs is None:
        args.max_num_seqs = min(EVAL_SEQS, args.max_num_batched_tokens or EVAL_SEQS)
    llm, load_s = _load(args, text=True, chat=True)
    with report.progress_bars(questions, quiet=not log.isEnabledFor(logging.INFO)) as progress:
        result = run.ask(
            llm, args.model, questions,
            instructions=args.instructions, max_tokens=args.max_tokens, progress=progress,
        )  # fmt: skip
    paired = None if other is None else run.compare(result, other)
    record = {"fp4ward": __version__, **result.record(), "seed": args.seed, "load_s": round(load_s, 4)}
    record["engine"] = _plain(llm.config)
    if other is not None and paired is not None:
        differences = {name: d.record() for name, d in paired.items()}
        record["compared"] = {"model": other.model, "file": args.compare, "differences": differences}
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    if args.save is not None:
        _write(args.save, text + "\n")
    if args.plot is not None:
        report.plot(args.plot, result, other)
    if args.json:
        print(text)
    else:
        report.show(result, other, paired)
    silent = sum(not a.answer for a in result.answers)
    if 2 * silent > len(result.answers) and not args.instructions:
        log.info("%d of %d replies hold no answer in the form that is looked for; --instructions tells the model which",
                 silent, len(result.answers))  # fmt: skip
    failed = [a.error for a in result.answers if a.error is not None]
    return _fail(f"error: {len(failed)} answers failed, the first so: {failed[0]}", 1) if failed else 0


def _check_writable(*paths: str | None) -> None:
    for path in (p for p in paths if p is not None):
        if Path(path).is_dir():
            raise UserError(f"{path or repr(path)}: Is a directory; a file is expected")
        if not Path(path).resolve().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}") from None


# --- plan -------------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> int:
    from fp4ward import hardware, pieces, plan, plan_text
    from fp4ward.checkpoint.hub import resolve_model
    from fp4ward.parallel.placement import Layout

    if args.json and args.why is not None:
        raise UserError("--why and --json were both given; --json holds every layer's reasons, give one")
    # What can be refused without the checkpoint is, before it is looked for.
    settings = {name: value for name in flags.ENGINE if (value := getattr(args, name, None)) is not None}
    layout = Layout(args.tp, args.ep, args.adp)
    options = plan.Options(EngineConfig(model=args.model, **settings), layout, tuple(args.replicate))
    plan.parse_wishes(options.config.kernel)
    _check_writable(args.html)
    machine = hardware.detect() if args.gpu is None else hardware.parse(args.gpu)
    if args.check_sharding and args.tp == 1:
        raise UserError("--check-sharding is for several ranks: give --tp 2 or more")
    folder = resolve_model(args.model, args.revision, weights=False)
    made = plan.make(pieces.read(folder, args.model), machine, options)
    if args.check_sharding:
        _check_sharding(folder, options.layout, args.replicate)
    if args.html is not None:
        _write(args.html, plan_text.html(made))
    if args.json:
        print(json.dumps(plan_text.record(made), indent=1, allow_nan=False))
    else:
        print(plan_text.why(made, args.why) if args.why is not None else plan_text.render(made))
    return _fail(f"error: {'; '.join(made.failures)}", 2) if made.failures else 0


def _check_sharding(folder: Path, layout: Layout, replicate: Sequence[str]) -> None:
    """Type the forward as the first, a middle and the last rank; UserError where it does not type."""
    from fp4ward import facts, models
    from fp4ward.checkpoint.index import open_documents
    from fp4ward.parallel.typed import check_sharding

    config, ranks = open_documents(folder).config, layout.tp
    known, forward = facts.load(config), models.load(facts.architecture(config))
    for rank in sorted({0, ranks // 2, ranks - 1}):
        check_sharding(known, forward, config, layout, rank, replicate=replicate)
    log.info("sharding types: the forward types on %d ranks, seen from the first, a middle and the last", ranks)


# --- lint -------------------------------------------------------------------------------------------------------------


def _lint(args: argparse.Namespace) -> int:
    from fp4ward import facts
    from fp4ward.checkpoint import lint
    from fp4ward.checkpoint.hub import resolve_model

    folder = resolve_model(args.model, args.revision)
    with contextlib.ExitStack() as stack:
        progress = None
        if args.scales and log.isEnabledFor(logging.INFO):
            from fp4ward.checkpoint.load import progress_bar

            progress = stack.enter_context(progress_bar("reading"))
        report = lint.examine(folder, facts.load, scales=args.scales, progress=progress)
    if args.json:
        print(json.dumps({"model": args.model, **lint.record(report)}, indent=1, allow_nan=False))
    else:
        print(_shown(lint.render(report, args.model)))
    errors = report.counts["error"]
    return _fail(f"error: {args.model}: {errors} error{'s' * (errors > 1)} found", 2) if errors else 0


# --- warm -------------------------------------------------------------------------------------------------------------


def _warm(args: argparse.Namespace) -> int:
    from fp4ward import hardware

    only_sm = re.fullmatch(r"sm=(\d{1,3})", args.gpu or "")
    sm = int(only_sm[1]) if only_sm else (hardware.parse(args.gpu) if args.gpu else hardware.detect()).sm
    if sm == 0:
        raise UserError("this machine has no NVIDIA GPU, and a CPU needs no kernels; name one with --gpu, such as H200")
    from fp4ward.checkpoint.load import progress_bar
    from fp4ward.kernels.specs import SPECS, unproven

    nvrtc = _kernels()
    if sm not in (known := (*nvrtc.TARGETS, 121)):  # 121 runs 120's code
        raise UserError(f"the CUDA kernels are not compiled for SM {sm}, but for {', '.join(map(str, known))}")
    where = nvrtc.cache()
    try:  # before a minute of compiling
        where.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=where).close()
    except OSError as e:
        raise UserError(f"{where} takes no files ({e.strerror or e}); FP4WARD_CACHE names another folder") from None
    rows, arch, start = nvrtc.rows(sm), nvrtc.arch(sm), time.perf_counter()
    with progress_bar(f"compiling for {arch}", count=True) as progress:
        kept = nvrtc.warm(rows, arch, progress if log.isEnabledFor(logging.INFO) else None)
    took = time.perf_counter() - start
    if kept < len(rows):
        raise UserError(f"{where} kept {kept} of {len(rows)} kernels (no room?); FP4WARD_CACHE names another folder")
    print(f"{kept} kernels for {arch} are in {where}, {took:.1f} s")
    if asked := [f"{s.op}={s.name}" for s in SPECS if s.module in nvrtc.HOLDERS and unproven(s)]:
        log.info("they run where they are asked for, because no GPU has run them yet: --kernel %s", ", ".join(asked))
    return 0


def _kernels() -> ModuleType:
    """fp4ward.kernels.nvrtc, told where the user keeps caches."""
    from fp4ward.kernels import nvrtc

    own, all_caches = os.environ.get("FP4WARD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    nvrtc.folder = Path(own) if own else Path(all_caches, "fp4ward") if all_caches else None
    return nvrtc


# --- env --------------------------------------------------------------------------------------------------------------


def _env(args: argparse.Namespace) -> int:
    from fp4ward.environment import collect, render

    info = collect()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0


# --- from flags to objects --------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace, *, text: bool, chat: bool) -> tuple[LLM, float]:
    """The model of these flags and the seconds it took. What can be refused is, before any weight is read."""
    from fp4ward.checkpoint import hub
    from fp4ward.plan import parse_wishes

    settings = {name: getattr(args, name) for name in flags.ENGINE if getattr(args, name) is not None}
    parse_wishes(EngineConfig(model=args.model, **settings).kernel)  # before seconds of importing torch
    start = time.perf_counter()
    from fp4ward.llm import LLM

    _kernels()
    quiet = not log.isEnabledFor(logging.INFO)
    needs = "chat" if chat else "text" if text else ""
    llm = LLM(args.model, **settings, needs=needs, show_progress=False if quiet else None)
    if llm.plan.unpacked and "OMP_NUM_THREADS" not in os.environ:
        # A small model's operations take microseconds: threads gain little, and on busy cores they wait for each other.
        from fp4ward.environment import set_threads

        set_threads(1)
    _show_notices(llm)
    if args.model == "demo" and args.command != "eval" and hub.resolve_model("demo") == hub.DEMO:
        log.info(
            "notice demo: a tiny model for the questions it was trained on, one at a time, in `fp4ward chat demo`; new "
            "names and larger numbers get wrong answers, and text outside a chat nonsense: %s", hub.DEMO / "README.md",
        )  # fmt: skip
    return llm, time.perf_counter() - start


def _show_notices(llm: LLM) -> None:
    shown = llm.notices if log.isEnabledFor(logging.DEBUG) else llm.notices[:NOTICES_SHOWN]
    for notice in shown:
        log.info("notice %s: %s: %s", notice.code, notice.where, notice.text)
    if len(shown) < len(llm.notices):
        log.info("%d more notices (--log-level debug shows them)", len(llm.notices) - len(shown))


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given; refused here if a value is bad."""
    from fp4ward.runtime.request import SamplingParams

    given = {name: getattr(args, name) for name in flags.SAMPLING if getattr(args, name, None) is not None}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _with_defaults(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """The checkpoint's sampling defaults under the user's flags. At a terminal an answer has no length limit but the
    context, where the class's own default of 16 tokens (vLLM's) would cut it off."""
    return dataclasses.replace(llm.default_sampling_params(max_tokens=None), **given)


@contextlib.contextmanager
def _logging_to_stderr(level: str) -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fp4ward: %(message)s"))
    log.addHandler(handler)
    before, log.propagate = log.level, False
    log.setLevel(level.upper())
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a character must not end the answer
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = True


COMMANDS = {
    "generate": _generate, "chat": _chat, "eval": _eval, "plan": _plan, "lint": _lint, "warm": _warm, "env": _env,
}  # fmt: skip
