"""A small vocabulary, and texts drawn at random from what a grammar allows."""

import numpy as np

from mstar.engine.resources.grammar.compiled import CompiledGrammars
from mstar.engine.resources.grammar.config import Vocabulary
from mstar.engine.resources.grammar.vocabulary import grammar_tokenizer

_WORDS = ['{"', '"}', '":', '": ', ', "', "true", "null", "12", "[]", "{}", "ab", "abc", "\n  ", "é", "日本", "aa"]
PIECES = [
    b"",  # 0: special, without text
    b"</s>",  # 1: end of sequence
    b"<|im_end|>",  # 2: special, and a stop id of chats
    *(bytes([i]) for i in range(256)),
    *(word.encode() for word in _WORDS),
    b"a",  # a second id of the same text
    b"",  # not special, and of no text
]
EOS, IM_END, FIRST_BYTE = 1, 2, 3
VOCAB = len(PIECES) + 20  # the logits are wider than the vocabulary
VOCABULARY = Vocabulary(PIECES, special_ids=(0, 1, 2), eos_ids=(1,))
TOKENIZER = grammar_tokenizer(VOCABULARY, VOCAB)


def byte_id(char):
    return FIRST_BYTE + ord(char)


def word_id(word):
    return FIRST_BYTE + 256 + _WORDS.index(word)


def compiled(kind, text):
    return CompiledGrammars(lambda: TOKENIZER).get(kind, text)


def accepts(kind, text, *texts):
    """Whether each of ``texts``, byte by byte, follows the guide."""
    start = compiled(kind, text).matcher
    found = []
    for each in texts:
        matcher = start.deep_copy()
        ids = [FIRST_BYTE + byte for byte in each.encode()]
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


def allowed(matcher):
    """Ids that may come next, the end of the text (``VOCAB``) among them."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))


def sampled(start, seed, most=600):
    """A text drawn at random, structure and ends being likely; None if it found no end within ``most`` tokens."""
    rng, matcher, text = np.random.default_rng(seed), start.deep_copy(), b""
    for _ in range(most):
        ids = allowed(matcher)
        assert not matcher.is_error(), (text, matcher.get_error())
        assert ids.size, text
        if ids[-1] == VOCAB and (ids.size == 1 or rng.random() < 0.3):
            return text.decode()
        ids = ids[ids < VOCAB]
        weights = np.where([PIECES[i] in (b'"', b"}", b"]", b",", b":", b'"}', b'":') for i in ids], 25.0, 1.0)
        token = int(rng.choice(ids, p=weights / weights.sum()))
        text += PIECES[token]
        assert matcher.consume_token(token)
    return None
