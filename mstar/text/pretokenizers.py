"""The pre-tokenizers that ``tokenizer.ggml.pre`` names: how a byte-level BPE cuts a text before it merges.

Patterns come from the tokenizer.json of the models that gave the names (in llama.cpp's ``llama-vocab.cpp`` the names
select equivalent patterns).  Only names whose rule is known to be right are here; another one is refused at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from mstar.utils.errors import LoadError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_DIGIT = r"\p{N}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """One rule: each pattern cuts what the ones before it left, then bytes become letters.

    Attributes:
        patterns: regular expressions; a match and what lies between matches become pieces of their own.
        normalizer: makes the normalisation applied first, if any.
        ignore_merges: a piece that is a token as a whole is taken as it is.
        add_bos: encode begins with the begin token where the file does not say.
    """

    patterns: tuple[str, ...]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGITS_RULE = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreTokenizer((_QWEN2,), normalizer=normalizers.NFC)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": _GPT2_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "olmo": _GPT2_RULE,
    "qwen2": _QWEN2_RULE,
    "refact": _DIGITS_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
}


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """The rule called ``name``.

    Raises:
        LoadError: there is none; the message lists the known ones.
    """
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise LoadError(f"tokenizer.ggml.pre: one of {', '.join(PRE_TOKENIZERS)} is supported, got {name!r}")
    return rule
