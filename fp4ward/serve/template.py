"""Chat template: messages -> prompt, as transformers renders them, in a sandbox with bounds on time and size."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fp4ward.errors import UserError, one_line

# A template is code from the checkpoint: it may not run for ever nor write without end.
MAX_RENDERED = 16 * 2**20  # characters
MAX_SECONDS = 10.0
MAX_NUMBER = 10**6  # as an argument, where it may be a width or a count
WIDTH = re.compile(r"\d{7}|\*")  # in a format: a width of millions, or one that is an argument


class _Refused(jinja2.TemplateError):
    """The template called raise_exception: its words are for the user."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks training spans; here the body is just text."""

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_Generation.tags = {"generation"}


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives to templates, bounded in time and in the size of what one operation makes."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
        del self.globals["lipsum"]
        self.filters = {name: self._bounded(name, run) for name, run in self.filters.items()}
        self.deadline = 0.0

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Each turn of a loop and each call of a macro looks at the clock first."""
        tree = self.parse(source)
        nodes_that_repeat: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in nodes_that_repeat:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return self.from_string(_JoinBounded().visit(tree))

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it ran for more than {MAX_SECONDS:g} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = (str, list, tuple)
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            _check_size(len(left) + len(right) * (1 if isinstance(left, str) else 8))
        if operator == "%" and isinstance(left, str) and WIDTH.search(left):
            raise SecurityError("it asks for a width of millions")
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_size(16 * (left.bit_length() + right.bit_length()))
        for one, times in ((left, right), (right, left)):
            repeats = operator == "*" and isinstance(one, (str, list, tuple)) and isinstance(times, int)
            if repeats and len(one) * times > MAX_RENDERED:
                raise SecurityError("it repeats a value too often")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 4096:
            raise SecurityError("it raises a number to too high a power")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # what macros and blocks wrote
        pieces = list(pieces)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    @staticmethod
    def join_bounded(*values: object) -> str:
        return _Environment.concat(map(str, values))

    def call(self, context: Any, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        own = getattr(run, "__self__", None)
        _check_arguments(getattr(run, "__name__", ""), (own, *args) if isinstance(own, str) else args, kwargs)
        return super().call(context, run, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        own = getattr(value, "__self__", "")
        if isinstance(own, str) and (WIDTH.search(own) or re.search(r":[^}]*\{", own)):
            raise SecurityError("it asks for a width of millions")
        return super().wrap_str_format(value)

    def _bounded(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)  # with the mark that tells whether the first argument is the environment
        def bounded(*args: Any, **kwargs: Any) -> Any:
            plain = args[1:] if hasattr(run, "jinja_pass_arg") else args
            if name == "format" and plain and WIDTH.search(str(plain[0])):
                raise SecurityError("it asks for a width of millions")
            _check_arguments(name, plain, kwargs)
            return run(*args, **kwargs)

        return bounded


class _JoinBounded(NodeTransformer):
    """`a ~ b` as a call that looks at the size first."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_bounded"), node.nodes, [], None, None).set_lineno(
            node.lineno
        )


def _check_size(size: int) -> None:
    if size > MAX_RENDERED:
        raise SecurityError(f"it makes a value of more than {MAX_RENDERED} characters")


def _check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Before a function, method or filter of this name runs: numbers that may be widths, texts that multiply."""
    every = [*args, *kwargs.values()]
    if any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in every):
        raise SecurityError(f"a number beyond {MAX_NUMBER} is an argument of {name}")
    texts = [one for one in every if isinstance(one, str)]
    if name == "replace" and len(texts) == 3:
        _check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    elif name == "join":
        parts = [part for one in every if isinstance(one, (list, tuple)) for part in one]
        _check_size(sum(len(p) for p in parts if isinstance(p, str)) + len(parts) * sum(map(len, texts)))
    elif name in ("indent", "wordwrap"):
        _check_size(math.prod(max(1, len(text)) for text in texts))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class ChatTemplate:
    """Messages -> prompt. sources: by name; "default", and "tool_use" if tools have a template of their own."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.special_tokens = dict(special_tokens)
        self.where = where
        self._compiled: dict[str, tuple[_Environment, jinja2.Template]] = {}
        self._takes_parts: dict[str, bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> str:
        """messages as OpenAI's API has them; content may be a list of text parts, arguments of tool calls may be JSON.

        Leading system messages beyond the first are joined to it where the template refuses them. UserError for
        messages that are malformed or that the template refuses, and for a template that is invalid or does not end.
        """
        if tools and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
            raise UserError("tools must be a list of objects")
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        clean = _checked_messages(messages)
        if any(isinstance(m.get("content"), list) for m in clean) and not self._parts_render(name):
            clean = [{**m, "content": _joined(m["content"])} if m.get("content") is not None else m for m in clean]
        given = {
            **self.special_tokens,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **chat_template_kwargs,
        }
        refused: _Refused | None = None
        for attempt in (clean, _one_system(clean)):
            try:
                return self._run(name, {**given, "messages": attempt})
            except _Refused as error:
                refused = error
        raise UserError(f"{self.where}: the chat template refused the messages: {one_line(refused)}")

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        """_Refused passes; every other fault of the template is a UserError."""
        environment, template = self._template(name)
        environment.deadline = time.monotonic() + MAX_SECONDS
        pieces, size = [], 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED:
                    raise SecurityError(f"it wrote more than {MAX_RENDERED} characters")
                pieces.append(piece)
        except _Refused:
            raise
        except Exception as error:
            raise UserError(f"{self.where}: the chat template failed on the messages: {one_line(error)}") from None
        return "".join(pieces)

    def _template(self, name: str) -> tuple[_Environment, jinja2.Template]:
        if name not in self._compiled:
            environment = _Environment()
            try:
                self._compiled[name] = environment, environment.compile_bounded(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                where = f"{self.where}, line {error.lineno}"
                raise UserError(f"{where}: the chat template is not valid: {one_line(error.message)}") from None
            except Exception as error:
                raise UserError(f"{self.where}: the chat template cannot be compiled: {one_line(error)}") from None
        return self._compiled[name]

    def _parts_render(self, name: str) -> bool:
        """Whether the template reads a list of parts itself: one part must come out as the same text given plainly."""
        if name not in self._takes_parts:
            probe = "a text to look for"
            shown = []
            for content in (probe, [{"type": "text", "text": probe}]):
                try:
                    variables = {**self.special_tokens, "messages": [{"role": "user", "content": content}]}
                    shown.append(self._run(name, variables))
                except (UserError, _Refused):
                    shown.append(repr(content))
            self._takes_parts[name] = shown[0] == shown[1] and probe in shown[0]
        return self._takes_parts[name]


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run of system messages at the start as one, their texts a blank line apart."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(_joined(message.get("content") or "") for message in messages[:count])
    return [{**messages[0], "content": text}, *messages[count:]]


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies with tool-call arguments parsed; UserError that names the message."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError("messages must be a list with at least one message")
    clean = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} must be an object with a 'role'")
        one, content = dict(message), message.get("content")
        if isinstance(content, (list, tuple)):
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise UserError(f"{where}: a content part of type {kind!r} cannot be read; only text parts can")
            one["content"] = list(content)
        elif content is not None and not isinstance(content, str):
            raise UserError(f"{where}: content must be a text or a list of text parts, not {type(content).__name__}")
        calls = message.get("tool_calls")
        if calls is not None:
            if not isinstance(calls, (list, tuple)):
                raise UserError(f"{where}: tool_calls must be a list")
            one["tool_calls"] = [_parsed_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)]
        clean.append(one)
    return clean


def _parsed_call(call: object, where: str) -> dict[str, Any]:
    """Templates want arguments as a mapping; the API carries them as a JSON text."""
    if not isinstance(call, Mapping):
        raise UserError(f"{where} must be an object")
    if "function" in call:
        return {**call, "function": _parsed_call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: arguments are not valid JSON: {one_line(error)}") from None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}: arguments must be a JSON object, not {type(arguments).__name__}")
    return {**call, "arguments": arguments}
