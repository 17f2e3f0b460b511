"""Grammars that requests' texts follow: a matcher per row, and the tokens that it allows next."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, Resource, RowVerdict
from mstar.engine.resources.grammar.compiled import (
    CompiledGrammar,
    CompiledGrammars,
    is_limited,
    is_spent,
    reason_of,
)
from mstar.engine.resources.grammar.config import GrammarReqConfig, GrammarSpec
from mstar.engine.resources.grammar.guides import excess
from mstar.engine.resources.grammar.masks import SlotMasks, bar_rows, bar_runs, bits_of, num_words, runs_of, settle_ends
from mstar.engine.resources.grammar.vocabulary import grammar_tokenizer
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Row:
    """A row under a grammar: where it is in it, and the tokens that brought it there."""

    request_id: int
    config: GrammarReqConfig
    grammar: CompiledGrammar
    matcher: LLMatcher
    tokens: list[int]


class _Batch(NamedTuple):
    """Which rows of a step are under a grammar: ``places`` in the batch, ``rows`` in the masters, both int64 [live].

    Holds while the step's rows are this very array and ``version`` stands.
    """

    step_rows: np.ndarray
    version: int
    places: np.ndarray
    rows: np.ndarray
    runs: list[tuple[int, int, int]]


class _PlannedStep(NamedTuple):
    """``words`` int32 [live, words] of a batch's live rows; ``on_device``: masks and whose they are, where a device
    reads them."""

    batch: _Batch
    words: np.ndarray
    on_device: tuple[torch.Tensor, torch.Tensor] | None


class Grammars(Resource):
    """Bars the tokens that a row's grammar does not allow.

    A row's mask is made when its last token is accepted, so that a grammar that fails ends its own row there, and a
    plan only copies.  The row must not be stepped again before that.

    Where a grammar lets the text end, the end-of-sequence ids and the request's stop ids may be drawn, nowhere else:
    a text that they cut off would not follow the grammar.  So a stop id that is text of the grammar as well is never
    drawn as text; other tokens can spell it.  With ``ignore_eos`` end-of-sequence ids are barred everywhere, and a
    row ends when its grammar allows nothing more.

    ``counters``: ``accepted`` tokens, ``broken`` rows, ``renewed`` lexers.
    """

    force_double_buffer = True

    def __init__(self, spec: GrammarSpec, info: EngineResourceInfo) -> None:
        self._vocab_size = spec.vocab_size
        # Both for the first grammar, on the thread that prepares it: most engines never see one.
        self._vocabulary = functools.cache(spec.vocabulary)
        tokenizer = functools.cache(lambda: grammar_tokenizer(self._vocabulary(), spec.vocab_size))
        self._grammars = CompiledGrammars(tokenizer)
        self._executor = LLExecutor()
        words = num_words(spec.vocab_size)
        self._rows: dict[int, _Row] = {}
        self._words = np.zeros((info.capacity, words), np.int32)  # tokens that may come next, ends among them
        self._ends = np.zeros((info.capacity, words), np.int32)  # ids that end the row's text
        self._is_live = np.zeros(info.total_rows, np.bool_)
        self._row_of: dict[int, int] = {}
        self._version = 0  # of who is live
        self._batches: dict[int, _Batch] = {}  # the last one of each slot
        self._planned: _PlannedStep | None = None
        self._slots = None if info.device.type == "cpu" else SlotMasks(words, info.device, info.num_slots)
        self.counters = {"accepted": 0, "broken": 0, "renewed": 0}

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, GrammarSpec)
        return cls(spec, info)

    def prepare_request(self, config: ResourceReqConfig) -> None:
        """Compiles the request's grammar; llguidance leaves the interpreter to others meanwhile.

        Raises:
            ValueError: its guide is malformed, unsupported or unsatisfiable.
        """
        assert isinstance(config, GrammarReqConfig)
        if config.kind is not None:
            self._grammars.get(config.kind, config.text)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Puts the row at the start of its grammar.  A request that is already there keeps its place in it.

        Raises:
            ValueError: as :meth:`prepare_request`, where that was not called before.
        """
        assert config is None or isinstance(config, GrammarReqConfig)
        if config is None or config.kind is None or self._row_of.get(request_id) == row:
            return
        grammar = self._grammars.get(config.kind, config.text)
        self._rows[row] = _Row(request_id, config, grammar, grammar.matcher.deep_copy(), [])
        self._ends[row] = bits_of(
            (*(() if config.ignore_eos else self._vocabulary().eos_ids), *config.stop_ids), self._vocab_size
        )
        self._words[row] = settle_ends(grammar.words[None], self._ends[row, None], self._vocab_size)[0]
        self._row_of[request_id] = row
        self._is_live[row] = True
        self._version += 1

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            del self._rows[row]
            self._is_live[row] = False
            self._version += 1

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None
        slots, lease = self._slots, ctx.slot_lease
        if not self._row_of and (slots is None or lease is None):
            return
        batch = self._batches.get(ctx.slot)
        if batch is None or batch.step_rows is not ctx.rows or batch.version != self._version:
            places = np.flatnonzero(self._is_live[ctx.rows])
            batch = _Batch(ctx.rows, self._version, places, ctx.rows[places], runs_of(places))
            self._batches[ctx.slot] = batch
        if not batch.places.size and (slots is None or lease is None):
            return
        words = self._words[batch.rows]  # a copy: the masters may move before the forward has read them
        on_device = None if slots is None else slots.put(words, batch.places, ctx.rows.size, lease)
        self._planned = _PlannedStep(batch, words, on_device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Bars what grammars do not allow in ``logits`` [bs, V]: -inf, in place.  Other rows are not touched."""
        if self._slots is not None:
            if self._planned is not None and self._planned.on_device is not None:
                bar_rows(logits, *self._planned.on_device)
            return logits
        with strict_mode.opaque("grammar"):
            planned = self._planned
            if planned is not None:
                bar_runs(logits, planned.words, planned.batch.runs)
        return logits

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None

    def accept_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """Moves the grammars of these rows past their tokens, which end no text by themselves.

        Returns:
            COMPLETE where only an end could follow; BROKEN, with its reason logged, where the grammar does not allow
            the token or became too complex; None when no row is under a grammar.
        """
        live = np.flatnonzero(self._is_live[rows])
        if not live.size:
            return None
        live_rows = rows[live]
        places = live_rows.tolist()
        moved = [self._rows[row] for row in places]
        self._advance(moved, tokens[live].tolist(), live_rows)
        is_broken = np.fromiter((self._is_broken(each, row) for each, row in zip(moved, places, strict=True)), np.bool_)
        self._words[live_rows], is_over = settle_ends(self._words[live_rows], self._ends[live_rows], self._vocab_size)
        verdicts = np.zeros(rows.size, np.uint8)
        verdicts[live[is_over]] = RowVerdict.COMPLETE
        verdicts[live[is_broken]] = RowVerdict.BROKEN
        for i in np.flatnonzero(is_broken).tolist():
            log.warning("the grammar of request %d broke off: %s", moved[i].request_id, reason_of(moved[i].matcher))
        self.counters["accepted"] += live.size
        self.counters["broken"] += int(is_broken.sum())
        return verdicts

    def reason_of(self, row: int) -> str:
        moved = self._rows.get(row)
        if moved is None or not is_limited(moved.matcher):
            return ""
        return excess(moved.config.text, reason_of(moved.matcher))

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        if self._slots is not None:
            self._slots.reserve(max_bs)

    def _advance(self, moved: list[_Row], tokens: list[int], rows: np.ndarray) -> None:
        """Moves each matcher past its token and writes what it allows then into its row of the masters.

        llguidance's threads take several rows; a matcher that fails allows the end alone.
        """
        for each, token in zip(moved, tokens, strict=True):
            each.tokens.append(token)
        matchers = [each.matcher for each in moved]
        if len(matchers) == 1:
            matchers[0].consume_token(tokens[0])
            fill_next_token_bitmask(matchers[0], self._words, int(rows[0]))
            return
        consume_token_par(self._executor, list(zip(matchers, tokens, strict=True)))
        fill_next_token_bitmask_par(self._executor, list(zip(matchers, rows.tolist(), strict=True)), self._words)

    def _is_broken(self, moved: _Row, row: int) -> bool:
        """Whether the row's matcher failed, after one more attempt with a new lexer where only that was spent."""
        if not moved.matcher.is_error():
            return False
        if is_spent(moved.matcher):
            config = moved.config
            assert config.kind is not None
            moved.grammar = self._grammars.renewed(config.kind, config.text, moved.grammar)
            moved.matcher = moved.grammar.matcher.deep_copy()
            moved.matcher.consume_tokens(moved.tokens)
            fill_next_token_bitmask(moved.matcher, self._words, row)
            self.counters["renewed"] += 1
        return moved.matcher.is_error()
