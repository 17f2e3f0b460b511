"""Guides: what each kind allows, and that everything else is refused with the request's field and a reason."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.grammar import compiled as module
from mstar.engine.resources.grammar.compiled import CompiledGrammars
from mstar.engine.resources.grammar.config import MAX_GUIDE_BYTES
from tests.engine.resources.grammars import FIRST_BYTE, TOKENIZER, VOCAB, accepts, allowed, byte_id, compiled, word_id


def refusal(kind, text):
    with pytest.raises(ValueError, match=r"^guided_decoding_guide") as caught:
        compiled(kind, text)
    return str(caught.value)


def test_a_regex_must_match_the_whole_text():
    assert accepts("regex", r"\d{3}-\d{4}", "555-1234", "555-123", "x555-1234") == [True, False, False]
    assert accepts("regex", "^a|b$", "a", "b", "ab") == [True, True, False]
    assert accepts("regex", "a/b\n|é+", "a/b\n", "éé", "a/b") == [True, True, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "unclosed group"),
        ("a{2,1}", "invalid repetition count"),
        ("a(?=b)", "look-around"),
        (r"\bfoo", "lookarounds"),
        (r"(a)\1", "backreferences"),
        (r"[^\s\S]", "no text satisfies it"),
        (r"a[^\s\S]", "no text satisfies it"),
        ("", "only the empty text"),
        (r"(a[^\s\S])*", "only the empty text"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_regex_that_cannot_be_honoured_is_refused(text, reason):
    assert reason in refusal("regex", text)


def test_a_choice_is_one_of_its_strings_whatever_they_hold():
    choices = ["a", "ab", "a", "", "(", "a/b", "\n\0", 'é"', "[x]", "-#&~^$ |"]
    assert accepts("choice", json.dumps(choices), *choices) == [True] * len(choices)
    assert accepts("choice", json.dumps(choices), "b", "abc", "[x", "-#&~^") == [False] * 4


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6).filter(any))
@settings(max_examples=40, deadline=None)
def test_any_choices_are_allowed_and_nothing_else(choices):
    others = [choice + "x" for choice in choices]
    given_, expected = [*choices, *others], [True] * len(choices) + [each in choices for each in others]
    assert accepts("choice", json.dumps(choices), *given_) == expected


@pytest.mark.parametrize("text", ["[]", '[""]', "[1]", '{"a": 1}', '"a"', "a", "[NaN]", '["a", null]'])
def test_what_is_no_list_of_strings_is_no_choice(text):
    assert "a JSON list of strings" in refusal("choice", text)


def test_json_is_any_object_and_nothing_but_an_object():
    texts = ["{}", '{"a": [1, {"b": null}]}', '{\n  "é": true\n}', "[]", "1", '{"a"}', "{} "]
    assert accepts("json", "", *texts) == [True, True, True, False, False, False, False]


def test_json_takes_no_schema():
    assert "guide: empty for type json, got '{}'" in refusal("json", "{}")


def test_white_space_in_json_is_a_space_or_a_line_break_with_its_indent():
    texts = ['{"a":1}', '{ "a" : 1 }', '{\n\t"a":\r\n  1}', '{"a":  1}', '{"a":\n\n1}', '{"a":\n' + 33 * " " + "1}"]
    assert accepts("json", "", *texts) == [True, True, True, False, False, False]


def test_the_model_may_spell_a_text_by_any_tokens():
    ids = set(allowed(compiled("regex", "abcd").matcher).tolist())
    assert {byte_id("a"), word_id("ab"), word_id("abc")} <= ids
    assert len(ids) == 4  # "a" has two ids


def test_special_and_unused_ids_never_are_text():
    ids = allowed(compiled("regex", r"(?s).*").matcher)
    text_ids = set(range(FIRST_BYTE, FIRST_BYTE + 256 + 17))
    assert set(ids.tolist()) <= text_ids | {VOCAB}
    assert not accepts("regex", "</s>", "</s")[0]
    assert accepts("regex", "</s>", "</s>")[0]  # as text, spelt by other tokens than the special one


def test_an_error_tells_what_is_allowed_and_what_came():
    text = refusal("json_schema", '{"type": "array", "uniqueItems": true}')
    assert text.startswith("guided_decoding_guide: a JSON schema")
    assert "uniqueItems" in text
    assert '"type": "array"' in text
    assert refusal("regex", "a" * (MAX_GUIDE_BYTES + 1)).endswith(f"{MAX_GUIDE_BYTES} bytes, got {MAX_GUIDE_BYTES + 1}")
    assert "guide_type: one of json, json_schema, regex, ebnf_grammar, choice, got 'xml'" in refusal("xml", "")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a{100}){100}){100}"),
        ("regex", "(a|aa){1,5000}"),
        ("regex", "(.{0,500}x){50}"),
        ("regex", "(" * 400 + "a" + ")" * 400),
        ("json_schema", "[" * 50_000),
        ("json_schema", '{"items":' * 5_000 + "{}" + "}" * 5_000),
        ("json_schema", '{"multipleOf": 1000003}'),
        ("json_schema", json.dumps({"maxItems": 10**6, "minLength": 10**6, "type": ["array", "string"]})),
        ("json_schema", json.dumps({"patternProperties": {f"^p{i}x": {} for i in range(300)}})),
        ("ebnf_grammar", "root ::= " + "(" * 5_000),
        ("ebnf_grammar", 'root ::= "(" root ")" | ([a-z]{0,500} "x"){50}'),
        ("ebnf_grammar", 'root ::= "(" root ")" | ' + " | ".join(f'"w{i}" root' for i in range(2000))),
        ("ebnf_grammar", "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40 ::= "x"\nroot ::= a0'),
        ("ebnf_grammar", "root ::= a0\n" + "".join(f'a{i} ::= "x" a{i + 1}\n' for i in range(990)) + 'a990 ::= "y"'),
    ],
)
def test_a_pathological_guide_is_served_or_refused_in_little_time(kind, text):
    def serve():
        matcher = compiled(kind, text).matcher.deep_copy()
        for _ in range(10):
            matcher.consume_token(int(allowed(matcher)[0]))

    start = time.process_time()
    with ThreadPoolExecutor(1) as pool:  # requests are prepared on threads, whose stack is smaller
        error = pool.submit(serve).exception()
    assert error is None or str(error).startswith("guided_decoding_guide")
    assert time.process_time() - start < 10


def test_a_guide_whose_first_tokens_take_too_much_is_refused_with_the_reason():
    text = refusal("regex", "((a{1,100}){1,100}){1,100}")
    assert text.startswith("guided_decoding_guide: a grammar within the engine's limits, got '((a{1,100}")
    assert text.endswith("}': too many expressions constructed")


def test_a_schema_of_1500_properties_is_served():
    properties = {f"property_{i:04d}": {"type": "string", "description": "x" * 60} for i in range(1500)}
    schema = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    assert accepts("json_schema", schema, '{"property_0007":"x","property_1499":""}', '{"property_1500":""}') == [
        True,
        False,
    ]


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch):
    calls = []
    make = module.grammar_of
    monkeypatch.setattr(module, "grammar_of", lambda kind, text: calls.append(text) or make(kind, text))
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    grammars = CompiledGrammars(lambda: TOKENIZER)
    first = grammars.get("regex", "a")
    assert grammars.get("regex", "a") is first
    grammars.get("regex", "b")
    grammars.get("regex", "a")
    grammars.get("regex", "c")  # forgets b, which was used least recently
    grammars.get("regex", "a")
    grammars.get("regex", "b")
    assert calls == ["a", "b", "c", "b"]
    assert grammars.get("choice", '["a"]') is not first


def test_threads_may_compile_at_once():
    grammars, errors = CompiledGrammars(lambda: TOKENIZER), []

    def work(start):
        try:
            for i in range(20):
                grammars.get("regex", f"a{{{(start + i) % 10 + 1}}}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    matcher = grammars.get("regex", "a{3}").matcher.deep_copy()
    assert matcher.try_consume_tokens([byte_id("a")] * 4) == 3
