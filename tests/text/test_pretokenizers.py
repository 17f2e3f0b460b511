"""Each named rule cuts a text exactly as the tokenizer of the model it is named after."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from mstar.text.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from mstar.utils.errors import LoadError

ByteLevel = pre_tokenizers.ByteLevel


def tiktoken(numbers: str) -> pre_tokenizers.PreTokenizer:
    """The rule as Llama 3's and Qwen2's tokenizer.json print it."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
PUBLISHED = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "llama-bpe": tiktoken(r"\p{N}{1,3}"),
    "llama3": tiktoken(r"\p{N}{1,3}"),
    "llama-v3": tiktoken(r"\p{N}{1,3}"),
    "qwen2": tiktoken(r"\p{N}"),
}
TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("aZ09 \n\r\t'sSlLvVeE!.(+<=~\u00e9\u4e2d\u0663\u00bd\u2165\u3000"),
        st.characters(exclude_categories=("Cs",)),
    )
)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@settings(deadline=None)
@given(text=TEXT)
@example(text="I've 1234 apples,  it'S  \n\n  20\u00bd%\t\u00e9t\u00e9 \u4e2d\u6587")
def test_cuts_equal_the_published_rule(name, text):
    assert find_pre_tokenizer(name).build().pre_tokenize_str(text) == PUBLISHED[name].pre_tokenize_str(text)


def test_default_cuts_punctuation_and_threes_of_digits():
    pieces = find_pre_tokenizer("default").build().pre_tokenize_str("ab, 12345+c")
    assert [piece for piece, _ in pieces] == ["ab", ",", "\u0120", "123", "45", "+", "c"]


def test_every_rule_but_the_default_is_compared_with_a_published_one():
    assert set(PRE_TOKENIZERS) - {"default"} == set(PUBLISHED)


@pytest.mark.parametrize("name", ["unheard-of", "", None, 3])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.pre: .*llama-bpe.*smollm"):
        find_pre_tokenizer(name)
