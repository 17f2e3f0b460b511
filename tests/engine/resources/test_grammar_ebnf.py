"""Rules in EBNF: the texts that a grammar allows are exactly those of its rules."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.grammar.gbnf import Alt, Chars, Ref, Repeat, Seq, parse
from tests.engine.resources.grammars import accepts, compiled

JSON = r"""
# JSON as llama.cpp writes it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
CASES = [
    (JSON, ['{"a": [1, 2.5e3, "x\\n\\u0041"], "é": {"c": null}} ', "{}"], ['{"a": 1,}', "{} {}", '{"a\n": 1}', "1"]),
    (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3  from table_2  where col_2 = 1 "]),
    ('root ::= ("a" | "b"){2,3} "c"?', ["ab", "bbb", "abc"], ["a", "abab", "c"]),
    ('root ::= [^a-c\\]]{2} "\\u00e9" "\\x41"', ["xyéA", "-[éA"], ["xaéA", "]xéA", "xyéB"]),
    ("root ::= . [-a] [a-]", ["é-a", "\n--"], ["--b"]),
    ('root ::= expr\nexpr ::= term ([-+*] term)*\nterm ::= [a-z]+ | "(" expr ")"', ["a+(bc*d)", "((a))"], ["a+", "(a"]),
    # A lexer that takes the longest match alone would refuse these:
    ('root ::= [a-z]* "z"', ["az", "zzz"], ["za"]),
    ('root ::= "(" root ")" | x "bc" | [a-z]* "z"\nx ::= "a" | "ab"', ["(abc)", "((abbc))", "((zaz))"], ["(ab)", "za"]),
    ('root ::= "" | "a" root "a"', ["", "aa", "aaaa"], ["a", "aaa"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
    ('root ::= "a" x?\n\n  x ::= "b"\n    | root # continued\n', ["a", "ab", "aaab"], ["b", "abb"]),
]


@pytest.mark.parametrize(("rules", "within", "without"), CASES, ids=lambda value: str(value)[:30])
def test_rules_allow_their_texts_and_no_others(rules, within, without):
    assert accepts("ebnf_grammar", rules, *within) == [True] * len(within)
    assert accepts("ebnf_grammar", rules, *without) == [False] * len(without)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ("", "no rule root"),
        ('x ::= "a"', "no rule root"),
        ("root ::= x", "uses x, which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ('root ::= root "a"', "rule root never comes to an end"),
        ('root ::= "a" root', "rule root never comes to an end"),
        ('root ::= "b" | x\nx ::= "a" x', "rule x never comes to an end"),
        ('root ::= ""', "only the empty text"),
        ('root := "a"', "line 1"),
        ('root ::= ("a"', "line 1: ) must stand before"),
        ('root ::= "a" )', "a rule's name must stand before"),
        ('root ::= "a', "is no part of a rule"),
        ("root ::= [z-a]", "must count up"),
        ("root ::= []", "allows no character"),
        (r"root ::= [^\x00-\U0010ffff]", "allows no character"),
        (r'root ::= "\q"', "is no escape"),
        (r'root ::= "\ud800"', "is no character"),
        ('root ::= "a"{3,2}', "must count up"),
        ('root ::= "a"{,}', "counts nothing"),
        ('root ::= "a"{1,99999}', "10000 at most"),
        ('root ::= "a"*+', "repeats a repetition"),
        ('root ::= "a" (= "b")', "is no part of a rule"),
        ("root ::= " + "(" * 60 + '"a"' + ")" * 60, "nested deeper than 50"),
        ("".join(f'r{i} ::= "a"\n' for i in range(1001)), "more than 1000 rules"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_malformed_and_endless_rules_are_refused(rules, reason):
    with pytest.raises(ValueError, match=r"^guided_decoding_guide: rules in EBNF") as caught:
        compiled("ebnf_grammar", rules)
    assert reason in str(caught.value)


WORDS = ["".join(word) for n in range(6) for word in itertools.product("ab", repeat=n)]
NAMES = ("root", "x", "y")
ATOMS = st.sampled_from(['"a"', '"b"', '"ab"', '"aba"', "[ab]", '""', *NAMES])
BODIES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=7,
)


def language(rules):
    """Words of at most five letters that each rule allows, by the definition of its operators."""
    words = {name: set() for name in rules}

    def of(node):
        if isinstance(node, Chars):
            return {letter for letter in "ab" if any(low <= ord(letter) <= high for low, high in node.ranges)}
        if isinstance(node, Ref):
            return words[node.name]
        if isinstance(node, Alt):
            return set().union(*map(of, node.options))
        if isinstance(node, Seq):
            return joined(map(of, node.items))
        assert isinstance(node, Repeat)
        item, most = of(node.item), 6 if node.most is None else node.most
        return set().union(*(joined([item] * n) for n in range(node.least, most + 1)))

    while (grown := {name: of(node) for name, node in rules.items()}) != words:
        words = grown
    return words


def joined(sets):
    found = {""}
    for each in sets:
        found = {left + right for left in found for right in each if len(left + right) <= 5}
    return found


@given(st.tuples(BODIES, BODIES, BODIES))
@settings(max_examples=120, deadline=None)
def test_any_rules_allow_exactly_their_language(bodies):
    text = "\n".join(f"{name} ::= {body}" for name, body in zip(NAMES, bodies, strict=True))
    expected = language(parse(text))["root"]
    try:
        found = accepts("ebnf_grammar", text, *WORDS)
    except ValueError as error:
        assert "never comes to an end" in str(error) or "only the empty text" in str(error)  # noqa: PT017
        return
    assert {word for word, is_in in zip(WORDS, found, strict=True) if is_in} == expected, text
