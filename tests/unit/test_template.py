"""Chat templates: rendered as transformers renders them; bad messages and bad templates give one sentence."""

from __future__ import annotations

import json
import time

import jinja2
import pytest
from tokenizers import Tokenizer, models

from fp4ward.errors import UserError
from fp4ward.serve import template as template_module
from fp4ward.serve.template import ChatTemplate

# The shape of Qwen3.5's template, shorter: text parts, tools as JSON, calls as XML, thinking on and off.
QWEN_LIKE = r"""
{%- macro show(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if 'text' in item -%}{{- item.text -}}{%- else -%}{{- raise_exception('Unexpected item.') -}}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}{{- '' -}}
    {%- else -%}{{- raise_exception('Unexpected content type.') -}}{%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>' }}
    {%- if messages[0].role == 'system' %}{{- '\n\n' + show(messages[0].content)|trim }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + show(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {%- continue %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + show(message.content)|trim + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\n' + show(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments|items %}
                {%- set value = value | tojson if value is mapping or value is sequence and value is not string else value | string %}
                {{- '<parameter=' + name + '>\n' + value + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {% endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + show(message.content) + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}
    {%- else %}{{- '<think>\n' }}{%- endif %}
{%- endif %}
"""  # noqa: E501

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "<b> & 'ü'", "parameters": {"type": "object", "properties": {}}},
}


def chat(source=QWEN_LIKE, **special) -> ChatTemplate:
    return ChatTemplate(source, special, "chat_template.jinja")


USER = {"role": "user", "content": "Hi <b>"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln", "n": 3, "deep": {"a": [1, "<"]}}}}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Yes."}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "12 °C"}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
def test_rendering_is_transformers(messages, tools):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|im_end|>")
    dump = "{{ eos_token }}{% for m in messages %}\n  {% if m %}\n{{ m | tojson(indent=2) }}\n{% endif %}{% endfor %}"
    for source in [QWEN_LIKE] if isinstance(messages[0]["content"], list) else [QWEN_LIKE, dump]:
        ours = chat(source, eos_token="<|im_end|>")
        for options in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}, {"enable_thinking": True}):
            expected = theirs.apply_chat_template(
                messages,
                tools=tools,
                chat_template=source,
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
            found = ours.render(messages, tools=tools, **options)
            assert found == expected


def test_the_generation_prompt_turns_thinking_on_and_off():
    assert chat().render([USER]).endswith("<|im_start|>assistant\n<think>\n")
    assert chat().render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_arguments_as_json_text_render_as_a_mapping():  # F39
    as_text = {
        "type": "function",
        "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])},
    }
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    expected = chat().render(messages)
    assert "<parameter=city>\nKöln\n</parameter>" in expected
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [as_text]}]
    assert chat().render(messages) == expected
    assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], str)  # the caller's are as they were
    bare = {"name": "f", "arguments": ""}
    assert "<function=f>\n</function>" in chat().render([USER, {"role": "assistant", "tool_calls": [bare]}])


def test_two_system_messages_render():  # F39
    one = chat().render([{"role": "system", "content": "A\n\nB"}, USER])
    two = [{"role": "system", "content": "A"}, {"role": "system", "content": [{"type": "text", "text": "B"}]}, USER]
    assert chat().render(two) == one
    # a template that takes both gets both
    assert chat("{% for m in messages %}{{ m.role[0] }}{% endfor %}").render(two) == "ssu"
    # later ones would change place: the template's own words
    with pytest.raises(UserError, match="System message must be at the beginning"):
        chat().render([USER, {"role": "system", "content": "B"}])


def test_text_parts_reach_templates_that_only_know_strings():
    plain = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert chat(plain).render([parts, USER]) == "[one\ntwo][Hi <b>]"
    assert "onetwo" in chat().render([parts])
    assert chat(plain).render([{"role": "user", "content": []}, {"role": "assistant"}]) == "[][]"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ([{"content": "x"}], "messages.0. must be an object with a 'role'"),
        ([USER, "x"], "messages.1."),
        ([{"role": "user", "content": 5}], "content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": ["x"]}], "content part"),
        ([{"role": "alien", "content": "x"}], "refused the messages: Unexpected message role"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "JSON object"),
    ],
)
def test_bad_messages_give_one_sentence(messages, match):
    with pytest.raises(UserError, match=match) as caught:
        chat().render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[0].content.nope.nope }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        # one operation that would take gigabytes
        "{{ '%1000000000s' | format('x') }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '%*d' % (1000000000, 5) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10000000000) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | indent(10**10) }}",
        "{{ 'a' | batch(10**10, 'x') | list }}",
        "{{ lipsum(n=900000) }}",
        "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
        "{{ (['x'] * 99999) | join('y' * 99999) }}",
        "{{ ('y' * 99999).join(['x'] * 99999) }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = t %}{% endfor %}",
    ],
)
def test_broken_or_hostile_templates_give_one_sentence(source):
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"chat_template\.jinja") as caught:
        chat(source).render([USER])
    assert "\n" not in str(caught.value) and time.monotonic() - begin < 8


def test_bounds_leave_ordinary_templates_alone():
    source = (
        "{{ 'a' ~ 1 ~ [2] }} {{ '%5s|%-3d' % ('x', 7) }} {{ '{:>4}'.format(3) }} {{ 'abc' | replace('b', 'xx') }} "
        "{{ ['p', 'q'] | join(', ') }} {{ 'q' | center(3) }}|{{ ('a\\nb' | indent(2)) }} {{ [1] + [2] }} {{ 3 * 4 }} "
        "{{ '%s=%s' | format('k', 'v') }} {{ messages | map(attribute='role') | list }} {% set s %}{{ 1 }}2{% endset %}"
        "{{ s + 'z' }}"
    )
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert chat(source).render([USER]) == plain.render(messages=[USER])


def test_templates_that_do_not_end_are_stopped(monkeypatch):
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(template_module, "MAX_RENDERED", 1000)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}X{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="more than 1000 characters"):
        chat(loops).render([USER])
    with pytest.raises(UserError, match=r"more than 0\.2 s"):
        chat(loops.replace("X", "")).render([USER])
    with pytest.raises(UserError, match=r"more than 0\.2 s"):
        chat("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}").render([USER])
