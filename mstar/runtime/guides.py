"""Guides: what the whole text of a request must be, from the spellings of several engines.

Here only what can be said without the model: whether a grammar compiles is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mstar.engine.resources.grammar.config import GUIDE_KINDS, MAX_GUIDE_BYTES
from mstar.runtime.json_text import DuplicateKey, parse_json
from mstar.runtime.param_table import FIELDS
from mstar.utils.errors import InvalidArgument, Unsupported

TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# In vLLM's objects guided_decoding and structured_outputs, and behind guided_: what each key means here.
TYPE_OF_KEY = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar", "choice": "choice"}
RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def check_guide(kind: str | None, text: str | None) -> str | None:
    """The guide as the engine takes it: its text, None where the type needs none.

    Args:
        kind: one of :data:`GUIDE_KINDS`.
        text: the guide; an empty one counts as none.

    Raises:
        InvalidArgument: a type without its guide or a guide without its type, text of more than 256 KiB, a schema that
            is no JSON object or bool, or a choice that is no JSON list of strings.
    """
    if kind is None:
        if text:
            raise InvalidArgument(TYPE, "one of " + ", ".join(GUIDE_KINDS) + " beside " + GUIDE, "none")
        return None
    if kind == "json":
        if text:
            raise InvalidArgument(GUIDE, "none beside type json, which is any object (json_schema takes one)", text)
        return None
    if not text:
        raise InvalidArgument(GUIDE, f"needed beside {TYPE} {kind}", "none")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(GUIDE, "valid UTF-8", text) from None
    if num_bytes > MAX_GUIDE_BYTES:
        raise InvalidArgument(GUIDE, f"at most {MAX_GUIDE_BYTES // 1024} KiB", f"{num_bytes} bytes")
    if kind == "json_schema" and not isinstance(_parse(GUIDE, text, "a JSON schema"), dict | bool):
        raise InvalidArgument(GUIDE, "a JSON schema: an object, true or false", text)
    if kind == "choice":
        choices = _parse(GUIDE, text, "a JSON list of strings")
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise InvalidArgument(GUIDE, "a JSON list of at least one string, none of them empty", text)
    return text


def respell_guide(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Our parameters for a guide in another engine's spelling; nothing where it asks for no guide.

    Args:
        key: ``guided_json``, ``guided_regex``, ``guided_grammar``, ``guided_choice``, ``guided_json_object``,
            ``guided_decoding``, ``structured_outputs`` or ``response_format``.
        value: what was given under it; an object or list may be its JSON text.

    Raises:
        InvalidArgument, Unsupported: as the value asks for something else; names ``key``.
    """
    if key == "response_format":
        yield from _response_format(key, value)
    elif key in ("guided_decoding", "structured_outputs"):
        yield from _structured_outputs(key, value)
    else:
        yield from _guide(key, key.removeprefix("guided_"), value)


def _guide(key: str, kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    if kind == "json_object":
        if FIELDS["ignore_eos"].coerce(value, given_as=key):
            yield from ((TYPE, "json"), (GUIDE, ""))
        return
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise InvalidArgument(key, "a string", value)
    if kind == "choice":
        value = _parse(key, value, "a list of strings") if isinstance(value, str) else value
        value = list(value) if isinstance(value, tuple | set | frozenset) else value
        if not isinstance(value, list):
            raise InvalidArgument(key, "a list of strings", value)
    if not value and not isinstance(value, bool | Mapping):
        raise InvalidArgument(key, "not empty", value)
    text = value if isinstance(value, str) else FIELDS[GUIDE].coerce(value, given_as=key)
    try:
        check_guide(TYPE_OF_KEY[kind], text)
    except InvalidArgument as error:
        raise InvalidArgument(key, str(error).removeprefix(f"{GUIDE}: ").partition(", got ")[0], value) from None
    yield from ((TYPE, TYPE_OF_KEY[kind]), (GUIDE, text))


def _structured_outputs(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    given = {name: item for name, item in _object(key, value).items() if item is not None and item is not False}
    kinds = (*TYPE_OF_KEY, "json_object")
    for name in given.keys() - set(kinds):
        raise Unsupported(f"{key}.{name}", "nothing but " + ", ".join(kinds), given[name])
    if len(given) > 1:
        raise InvalidArgument(key, "one of " + ", ".join(kinds), sorted(given))
    for name, item in given.items():
        yield from _guide(f"{key}.{name}", name, item)


def _response_format(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    form = _object(key, value)
    kind = form.get("type")
    if kind not in RESPONSE_FORMATS:
        raise InvalidArgument(f"{key}.type", "one of " + ", ".join(RESPONSE_FORMATS), kind)
    if kind == "json_object":
        yield from _guide(key, "json_object", True)
    elif kind == "json_schema":
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping) or schema.get("schema") is None:
            raise InvalidArgument(f"{key}.json_schema", "an object with schema", schema)
        yield from _guide(f"{key}.json_schema.schema", "json", schema["schema"])


def _object(key: str, value: Any) -> Mapping[str, Any]:
    value = _parse(key, value, "a JSON object") if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise InvalidArgument(key, "a JSON object", value)
    return value


def _parse(key: str, text: str, allowed: str) -> Any:
    try:
        return parse_json(text, allow_nan=False)
    except DuplicateKey as error:
        raise InvalidArgument(key, f"{allowed} with each key once", error.key) from None
    except ValueError:
        raise InvalidArgument(key, allowed, text) from None
