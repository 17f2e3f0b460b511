"""Compiled grammars, kept for requests that use the same guide."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mstar.engine.resources.grammar.guides import excess, grammar_of, refusal

PROBE_TOKENS = 32  # of one text that a new grammar is tried on; at most 25 ms each
MOST_KEPT = 128  # compiled grammars; one takes 20 kB to a few MB, 50 MB at most

# A mask that needs more than these ends its request: each bounds what one token costs (about 15 ms of lexer and
# 10 ms of parser) or what one grammar holds (0.3 kB a state).
LIMITS = LLParserLimits(
    max_items_in_row=10_000,  # time grows with the square: 13 ms, for an object of 2400 properties
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=200_000,
    max_lexer_states=150_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

_NOISE = re.compile(
    r"^at \d+\(\d+\): |failed to compile JSON schema: |<non-verbose/>|^(lexer|Parser) [eE]rror: |; consider making .*"
)


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A matcher at its start, never moved; ``words`` int32: bits of the tokens that may come first, and of the end.

    Copies of a matcher share the states of its lexer, which only grow in number: a guide that many texts have used
    is fast, and one day has none left to give.
    """

    matcher: LLMatcher
    words: np.ndarray


class CompiledGrammars:
    """The last :data:`MOST_KEPT` grammars that were asked for, by kind and text of their guide.  Any thread may ask."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """``tokenizer`` is asked for whenever a grammar is compiled, on the thread that wants it."""
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kind: str, text: str) -> CompiledGrammar:
        """The grammar of a guide, compiled now unless it is kept.

        Two threads that ask for a new one compile it twice; neither holds up the others.

        Raises:
            ValueError: the guide is malformed, unsupported or unsatisfiable; begins with the request's field.
        """
        key = (kind, text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        return self._keep(key, self._compile(kind, text))

    def renewed(self, kind: str, text: str, spent: CompiledGrammar) -> CompiledGrammar:
        """The grammar of a guide whose compiled form ``spent`` has no lexer states left."""
        key = (kind, text)
        with self._lock:
            found = self._kept.get(key)
        if found is not None and found is not spent:
            return found
        return self._keep(key, self._compile(kind, text))

    def _keep(self, key: tuple[str, str], compiled: CompiledGrammar) -> CompiledGrammar:
        with self._lock:
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, kind: str, text: str) -> CompiledGrammar:
        matcher = LLMatcher(self._tokenizer(), grammar_of(kind, text), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refusal(kind, text, reason_of(matcher))
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)
        end = matcher.is_accepting()
        if matcher.is_error():
            raise refusal(kind, text, "no text satisfies it, or it is too complex")
        if end and np.unpackbits(words.view(np.uint8)).sum() == 1:
            raise refusal(kind, text, "it allows only the empty text")
        _probe(matcher, text)
        return CompiledGrammar(matcher, words)


def _probe(start: LLMatcher, text: str) -> None:
    """ValueError if the first tokens of some text of the grammar already take more than :data:`LIMITS`."""
    matcher = start.deep_copy()
    for i in range(PROBE_TOKENS):
        ids = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_accepting():
            ids = ids[:-1]  # the end of the text
        if ids.size and not matcher.is_error():
            matcher.consume_token(int(ids[i * 7919 % ids.size]))  # a prime, to meet tokens of all kinds
        if matcher.is_error() and not is_spent(matcher):
            raise ValueError(excess(text, reason_of(matcher)))
        if not ids.size or matcher.is_error():
            return


def is_limited(matcher: LLMatcher) -> bool:
    """Whether a matcher is in error because of :data:`LIMITS`, not by a token that it does not allow."""
    error = matcher.get_error()
    return matcher.is_error() and "satisfy the grammar" not in error and "parser stopped" not in error


def is_spent(matcher: LLMatcher) -> bool:
    """Whether a matcher is in error because its lexer has no states left."""
    return "too many states" in matcher.get_error()


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher is in error, in one line without llguidance's picture of the grammar."""
    text = matcher.get_error()
    message = re.search(r"^error: (.*)", text, re.MULTILINE)
    first = message[1] if message else text.split("\n", 1)[0]
    return _NOISE.sub("", first).strip()
