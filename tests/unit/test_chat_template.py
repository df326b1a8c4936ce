"""Chat templates: equal to transformers, and harmless whatever the template tries."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import ChatTemplateError, PromptError
from cupaged.loading.chat_template import ChatTemplate
from cupaged.loading.tokenizer import Tokenizer
from tests.sample_tokenizers import smollm2, smollm2_golden, spm, tiny_metadata

ROOT = Path(__file__).parents[2]
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " <é> 'q'\n"},
    {"role": "assistant", "content": "A"},
]


def test_smollm2_equals_transformers() -> None:
    tokenizer = smollm2()
    assert tokenizer.chat_template is not None
    special_tokens: dict[str, Any] = dict(tokenizer.special_tokens)
    template = ChatTemplate(tokenizer.chat_template, **special_tokens)
    cases = smollm2_golden()["chat"]
    assert len(cases) == 4
    for case in cases:
        for rendering in case["renderings"]:
            text = template.render(
                case["messages"], add_generation_prompt=rendering["add_generation_prompt"]
            )
            assert text == rendering["text"], case["name"]
            assert tokenizer.encode(text, add_special_tokens=False) == rendering["ids"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param(
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n[U] {{ m.content }}\n"
            "  {% else %}\n[{{ m['role'] }}] {{ m.content | trim }}\n  {% endif %}\n"
            "{% endfor %}\nend\n",
            "[system] S\n[U]  <é> 'q'\n\n[assistant] A\nend",
            id="blocks take their line with them",
        ),
        pytest.param(
            "{{ messages[:2] | tojson }}|{{ messages[0] | tojson(indent=2) }}"
            "|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}|{{ '<&>' | tojson }}",
            '[{"role": "system", "content": "S"}, '
            '{"role": "user", "content": " <é> \'q\'\\n"}]'
            '|{\n  "role": "system",\n  "content": "S"\n}|{"a": 2, "b": 1}|"<&>"',
            id="JSON as it is",
        ),
        pytest.param(
            "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
            "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
            "systemassistant",
            id="break and continue",
        ),
        pytest.param(
            "{{ bos_token }}{{ pad_token }}|{{ nothing }}|{{ messages[0].nothing }}"
            "|{% if tools %}T{% endif %}{{ tools is none }}{{ documents is none }}"
            "{{ nothing is defined }}",
            "<s>|||TrueTrueFalse",
            id="what is undefined prints as nothing",
        ),
        pytest.param(
            "{% generation %}{% set x = 1 %}{{ messages[2].content }}{% endgeneration %}{{ x }}",
            "A",
            id="generation",
        ),
        pytest.param(
            "{% set ns = namespace(a=1, b='') %}{% for m in messages %}{% set ns.a = ns.a * 2 %}"
            "{% set ns.b = ns.b ~ m.role[0] %}{% endfor %}"
            "{{ ns.a }}{{ ns.b }}{{ '-' * 5 }}{{ 2 ** 10 }}{{ [1] * 2 }}",
            "8sua-----1024[1, 1]",
            id="namespace and operators",
        ),
        pytest.param(
            "{%- for m in messages -%}\n {{- m.content.strip().upper() }} {% endfor -%}\n\n "
            "{{ messages[1:] | length }}{{ messages | map(attribute='role') | join(',') }}"
            "{{ dict(a=1).items() | list }}",
            "S <É> 'Q' A 2system,user,assistant[('a', 1)]",
            id="methods and filters",
        ),
        pytest.param(
            "{% macro f(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(1, y=3) }}"
            "{{ '%s-%02d' % ('a', 3) }}{{ '{:>4}'.format('x') }}{{ 'a,b'.split(',') }}"
            "{{ raise_exception is defined }}",
            "<12><13>a-03   x['a', 'b']True",
            id="macros and formats",
        ),
        pytest.param(
            "{{ messages[0]['content'].startswith('S') }}{{ messages[-1].content is string }}"
            "{{ messages.0.role }}{{ messages is iterable }}{{ 7 // 2 }}{{ 7 / 2 }}"
            "{{ extra_name }}",
            "TrueTruesystemTrue33.53",
            id="indexing and extra names",
        ),
    ],
)
def test_templates_render_as_in_transformers(source: str, text: str) -> None:
    """The texts are what transformers 5.24 makes of these templates."""
    template = ChatTemplate(source, bos_token="<s>")
    assert template.render(MESSAGES, extra_name=3) == text


def test_the_prompt_for_an_answer() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")
    assert template.render(MESSAGES) == "S>"
    assert template.render(MESSAGES, add_generation_prompt=False) == "S"


def test_special_tokens_and_extra_names() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ tools | length }}"
    template = ChatTemplate(source, eos_token="</s>", image_token="<i>", bos_token=None)
    assert template.render(MESSAGES, tools=[1, 2]) == "</s><i>2"
    assert template.render(MESSAGES, tools=[], image_token="<j>") == "</s><j>0"


def test_the_clock_is_a_parameter() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26, 12, 0)
    )
    assert template.render(MESSAGES) == "26 Jul 2024"


def test_exactly_one_bos() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token=spm().bos_token)
    text = template.render([{"role": "user", "content": "hello"}])
    assert spm().encode(text, add_special_tokens=False).count(1) == 1
    assert spm().encode("hello").count(1) == 1  # the path of a plain prompt
    without = Tokenizer.from_gguf(tiny_metadata())
    assert (spm().encode(""), without.encode("")) == ([1], [])


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hello"], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x", "name": "y"}], r"messages\[0\]"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": "x"}, {"role": 1, "content": ""}], r"messages\[1\]\.role"),
    ],
)
def test_other_messages_are_refused(messages: Any, name: str) -> None:
    with pytest.raises(PromptError, match=rf"^{name} must be"):
        ChatTemplate("{{ messages }}").render(messages)


def test_a_refusal_carries_the_message_of_the_template() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}"
        "{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}{% endif %}"
    )
    with pytest.raises(ChatTemplateError, match="refuses the messages: Roles must alternate: sys"):
        template.render(MESSAGES)
    assert template.render(MESSAGES[1:]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__.__base__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': messages}) }}",
        "{{ ('{0.__class__}' | string).format(messages) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append({}) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ namespace(__html__=raise_exception) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = raise_exception %}",
        "{% set ns = namespace({'__class__': 1}) %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ range(10**9) | list }}",
        "{% for i in range(10**6) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "source", ["{{ lipsum.__globals__ }}", "{{ messages.append({}) }}", "{{ 'x' * 10**9 }}"]
)
def test_what_leaves_the_sandbox_is_called_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="tries to leave its sandbox"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ import_module }}{{ import_module('os') }}",
        "{{ open('file') }}",
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ nothing | tojson }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | random_filter_name }}",
    ],
)
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"chat template (fails|does not compile)"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% for m in messages %}",
        "{{ messages",
        "{% unknown %}",
        "{% generation %}",
        "{{" + "(" * 5_000 + "1" + ")" * 5_000 + "}}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
    ],
)
def test_a_template_that_does_not_compile_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


def test_the_line_of_a_syntax_error_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="at line 3: "):
        ChatTemplate("a\nb\n{% if %}")


def test_the_output_is_bounded() -> None:
    loops = "{% for i in range(100000) %}" * 3 + "xxxxxxxxxx" + "{% endfor %}" * 3
    with pytest.raises(ChatTemplateError, match="more than 1048576 characters"):
        ChatTemplate(loops).render(MESSAGES)
    exact = ChatTemplate("{{ messages[0].content }}", max_chars=5)
    assert exact.render([{"role": "user", "content": "12345"}]) == "12345"
    with pytest.raises(ChatTemplateError, match="more than 5 characters"):
        exact.render([{"role": "user", "content": "123456"}])


def test_renderings_do_not_see_each_other() -> None:
    template = ChatTemplate("{% set x = (x or 0) + 1 %}{{ x }}{{ messages[0].content }}")
    assert [template.render(MESSAGES) for _ in range(2)] == ["1S", "1S"]


def test_jinja_is_imported_late() -> None:
    program = (
        "import sys; import cupaged.loading.chat_template as module; "
        "assert 'jinja2' not in sys.modules; "
        "module.ChatTemplate('x'); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% for j in range(70) %}"
    "{% endfor %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


def test_a_template_that_never_ends_is_stopped() -> None:
    template = ChatTemplate(ENDLESS, max_seconds=0.2)
    with pytest.raises(ChatTemplateError, match=r"takes longer than 0\.2 seconds"):
        template.render(MESSAGES)
    assert sys.gettrace() is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is seen on Linux only")
def test_a_template_that_grows_without_output_is_stopped() -> None:
    with pytest.raises(ChatTemplateError, match="takes more than 512 MiB of memory"):
        ChatTemplate(GROWING, max_seconds=60).render(MESSAGES)
