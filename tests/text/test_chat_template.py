"""Chats are rendered as transformers renders them; what cannot be rendered is the client's error."""

from __future__ import annotations

import pytest

from mstar.text.chat_template import ChatTemplate
from mstar.utils.errors import InvalidArgument, LoadError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks": """
    {%- for message in messages %}
        {% if loop.first and message.role == 'system' %}
    SYSTEM {{ message.content | trim }}
            {% continue %}
        {% endif %}
        {% if loop.index > 3 %}{% break %}{% endif %}
    [{{ message.role }}] {{ message.content }}
    {% endfor %}""",
    "tools": "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ messages | tojson }}{{ bos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{{ eos_token }}",
    "date": "{{ strftime_now('%Y') }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
}
CHATS = [
    [{"role": "user", "content": "Hi <b>&'\u00e9\n"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "{{ 1 }}"},
        {"role": "user", "content": "Bye"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("extra", [{}, {"tools": [{"type": "function", "name": "f<>", "x": "\u00e9"}]}])
def test_text_equals_transformers(name, chat, extra):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt in (True, False):
        expected, _ = render([chat], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **tokens, **extra)
        template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
        assert template.render(chat, add_generation_prompt=prompt, **extra) == expected[0]


def test_text_parts_are_joined_for_templates_that_know_no_parts():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}").render(chat) == "<ab>"


def test_text_parts_reach_the_template():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(TEMPLATES["parts"]).render(chat) == "ab"


def test_a_token_the_checkpoint_lacks_renders_as_nothing():
    assert ChatTemplate("{{ bos_token }}x").render(CHATS[0]) == "x"


def test_a_message_with_tool_calls_needs_no_content():
    chat = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert ChatTemplate("{{ messages[0].tool_calls[0].name }}").render(chat) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ({}, "non-empty list"),
        ("hi", "non-empty list"),
        (None, "non-empty list"),
        (["hi"], "message 0 must be an object"),
        ([{"role": "user", "content": "a"}, 3], "message 1 must be an object"),
        ([{"content": "a"}], "message 0 must have a role"),
        ([{"role": "", "content": "a"}], "message 0 must have a role"),
        ([{"role": 1, "content": "a"}], "message 0 must have a role"),
        ([{"role": "user"}], "message 0 must have content"),
        ([{"role": "user", "content": None}], "message 0 must have content"),
        ([{"role": "user", "content": 5}], "message 0 must have content"),
        ([{"role": "user", "content": ["a"]}], "message 0 must have content"),
        ([{"role": "user", "content": [{"text": "a"}]}], "message 0 must have content"),
        ([{"role": "user", "content": "a\ud800"}], "valid Unicode"),
    ],
)
def test_what_is_no_chat_is_refused_as_messages(messages, message):
    with pytest.raises(InvalidArgument, match=rf"^messages: .*{message}"):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + messages }}", "concatenate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
    ],
)
def test_a_failing_template_is_the_messages_fault(source, reason):
    with pytest.raises(InvalidArgument, match=rf"^messages: must suit .*{reason}"):
        ChatTemplate(source).render(CHATS[0])


def test_text_in_a_message_is_never_run_as_a_template():
    assert "{{ 7 * 7 }}" in ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}"}])


@pytest.mark.parametrize("source", ["{% if %}", "{% for x in y %}", "{{ x | no_such_filter }}"])
def test_a_malformed_template_is_refused_at_load(source):
    with pytest.raises(LoadError, match=r"^chat template, line 1: "):
        ChatTemplate(source)
