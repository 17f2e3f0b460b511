"""Chat messages to a prompt, by the checkpoint's Jinja template, as transformers renders it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mstar.utils.errors import MAX_ECHO, InvalidArgument, LoadError

_FIELD = "messages"


class ChatTemplate:
    """A compiled template; ``render`` may be called from several threads.

    Args:
        source: the Jinja text.
        bos_token, eos_token: texts of the begin and end tokens, for templates that write them.

    Raises:
        LoadError: the template is malformed; the message says where.
    """

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(f"chat template, line {error.lineno}: {error.message}") from error
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt for ``messages``; it holds all special tokens, so encode it without adding any.

        Args:
            messages: objects with ``role`` (text) and ``content`` (text, or a list of parts with a ``type``; may be
                absent or null beside ``tool_calls``); other keys go to the template as they are.
            add_generation_prompt: end with the opening of the assistant's answer.
            extra: further variables of the template, such as ``tools``.

        Raises:
            InvalidArgument: the messages are no such list, or the template refuses them.
        """
        check_messages(messages)
        messages = [_joined_text(message) for message in messages]
        variables = {"tools": None, "documents": None, **self._tokens, **extra}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(_FIELD, "must be valid Unicode (no lone surrogates)", messages) from error
        except Exception as error:  # a template can fail in any way on what a client sends
            raise InvalidArgument(_FIELD, f"must suit the model's chat template ({_brief(error)})", messages) from error
        return text


def check_messages(messages: object) -> None:
    """Raise InvalidArgument unless ``messages`` is a list that a chat template can be given."""
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument(_FIELD, "must be a non-empty list of objects", messages)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            _refuse(index, "must be an object with role and content", message)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            _refuse(index, "must have a role that is non-empty text", message)
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
                _refuse(index, "must have content made of objects with a type", message)
        elif not isinstance(content, str):
            _refuse(index, "must have content that is text or a list of parts", message)


def _joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with content made of text parts alone as one text: few text models' templates take parts."""
    content = message.get("content")
    if not isinstance(content, list) or not all(
        part["type"] == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _refuse(index: int, rule: str, message: object) -> NoReturn:
    raise InvalidArgument(_FIELD, f"message {index} {rule}", message)


def _brief(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
