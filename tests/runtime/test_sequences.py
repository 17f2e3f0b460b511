"""One text between the engine's rows and the caller: what several rows taken at once come to."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from mstar.conductor.request import LOGPROB, NO_TOKEN, FinishReason, stop_code
from mstar.runtime.messages import EngineRequest
from mstar.runtime.params import SamplingParams
from mstar.runtime.sequences import TextSequence
from mstar.text.tokenizer import Tokenizer

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer():
    """A letter per token: ids 0 to 7 are a to h, 8 is half of a character."""
    vocab = {letter: index for index, letter in enumerate("abcdefgh")} | {"\u00c3": 8}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, "a"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def sequence_of(tokenizer, num_logprobs=-1, **params):
    request = EngineRequest(prompt_ids=b"\0" * 8, max_tokens=9, temperature=0.0, num_logprobs=num_logprobs)
    return TextSequence(request, SamplingParams(**params), tokenizer)


def take(sequence, *tokens, finish=RUNNING):
    for place, token in enumerate(tokens):
        record = np.zeros(1, LOGPROB)
        record["logprob"] = -1.0 - place
        sequence.take(token, finish if place + 1 == len(tokens) else RUNNING, record)


def test_tokens_behind_a_stop_string_do_not_count_nor_their_logprobs(tokenizer):
    sequence = sequence_of(tokenizer, 0, stop="cd")
    take(sequence, 1, 2, 3, 4, 5)
    assert sequence.absorb()
    assert (sequence.num_tokens, sequence.is_done) == (3, True)
    done = sequence.completion()
    assert (done.text, done.output_ids, done.stop_reason) == ("b", [1, 2, 3], "cd")
    assert [list(position) for position in done.logprobs] == [[1], [2], [3]]
    assert done.cumulative_logprob == -6.0


def test_only_a_text_that_still_runs_must_be_ended(tokenizer):
    sequence = sequence_of(tokenizer, stop="cd")
    take(sequence, 1, 2, 3, finish=LENGTH)
    assert not sequence.absorb()
    assert (sequence.completion().text, sequence.completion().finish_reason) == ("b", "stop")
    running = sequence_of(tokenizer, stop="cd")
    take(running, 1, 2)
    assert not running.absorb()
    assert not running.is_done


@pytest.mark.parametrize(("tokens", "text"), [((1, 2), "bc"), ((1, 8), "b\ufffd")])
def test_what_was_held_back_comes_with_the_end(tokenizer, tokens, text):
    sequence = sequence_of(tokenizer, stop="cd")
    take(sequence, *tokens)
    sequence.absorb()
    assert sequence.piece().text == "b"
    take(sequence, NO_TOKEN, finish=STOP)
    sequence.absorb()
    piece = sequence.piece()
    assert (piece.text, piece.output_ids, piece.finish_reason) == (text[1:], [], "stop")


def test_pieces_tell_the_sum_so_far_and_once_of_the_prompt(tokenizer):
    request = EngineRequest(prompt_ids=b"\0" * 8, max_tokens=9, temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)
    sequence = TextSequence(request, SamplingParams(), tokenizer)
    sequence.take_prompt(np.zeros(1, LOGPROB))
    pieces = []
    for tokens, finish in (((1, 2), RUNNING), ((3,), LENGTH)):
        take(sequence, *tokens, finish=finish)
        sequence.absorb()
        pieces.append(sequence.piece())
    assert [piece.cumulative_logprob for piece in pieces] == [-3.0, -4.0]
    assert [piece.prompt_logprobs is None for piece in pieces] == [False, True]
    assert [position and list(position) for position in pieces[0].prompt_logprobs] == [None, [0]]
    assert sequence.completion().cumulative_logprob == -4.0


def test_a_piece_has_the_tokens_since_the_last_one(tokenizer):
    sequence = sequence_of(tokenizer, 0, stop_token_ids=[5])
    take(sequence, 1, 8)
    sequence.absorb()
    first = sequence.piece()
    take(sequence, 8, stop_code(5), finish=STOP)
    sequence.absorb()
    last = sequence.piece()
    assert (first.output_ids, last.output_ids) == ([1, 8], [8])
    assert [len(piece.logprobs) for piece in (first, last)] == [2, 1]
    assert first.prompt_logprobs is None
    assert (first.stop_reason, last.stop_reason) == (None, "5")
