"""The prompt of n texts is computed once, by a real model: what was run, what came of it, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from mstar.conductor.conductor import Conductor
from mstar.conductor.protocols import StepEngine
from mstar.conductor.request import EngineRequest
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.runtime.prepare import sequences_of
from mstar.simulate.recording import RecordingEngine
from tests.runtime.tiny import HIDDEN, VOCAB, write_checkpoint

N, PROMPT, ANSWER = 8, 200, 50
LAST_PAGE = 8  # tokens of the prompt behind its last full page


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


class Served:
    """An engine that counts the tokens of prompts it runs."""

    def __init__(self, checkpoint: Path, **options: object) -> None:
        given = {"device": "cpu", "num_threads": 1, "max_running_requests": N, "max_seq_len": 256} | options
        core = EngineCore(EngineOptions(model=str(checkpoint), deterministic=True, **given))
        self.recorder = RecordingEngine(core.engine)
        self.conductor = Conductor(cast(StepEngine, self.recorder), core.model, core.conductor.limits)

    def run(self, requests: list[EngineRequest]) -> list[list[int]]:
        tokens: dict[int, list[int]] = {self.conductor.submit(each): [] for each in requests}
        while self.conductor.has_work():
            report = self.conductor.step()
            assert not report.failures
            for request_id, token in zip(report.request_ids.tolist(), report.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
        return [*tokens.values()]

    @property
    def prompt_tokens_run(self) -> int:
        return sum(span for step in self.recorder.steps for span in step.spans if span > 1)


def texts(**fields: object) -> list[EngineRequest]:
    ids = np.random.default_rng(0).integers(0, VOCAB, PROMPT).astype("<i4")
    values = {"max_tokens": ANSWER, "temperature": 1.0, "seed": 7, "ignore_eos": True} | fields
    return sequences_of(EngineRequest(prompt_ids=ids.tobytes(), **values), N)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("ahead", ["off", "on"])
@pytest.mark.parametrize("batch_tokens", [64, 2048])
def test_eight_texts_of_one_prompt_compute_it_once(checkpoint, batch_tokens, ahead, mixed):
    served = Served(checkpoint, run_ahead=ahead, mixed_steps=mixed, max_batch_tokens=batch_tokens)
    made = served.run(texts())
    assert served.prompt_tokens_run == PROMPT + (N - 1) * LAST_PAGE
    counters = served.conductor.counters
    assert counters.prompt_tokens == N * PROMPT
    assert counters.cached_prompt_tokens == (N - 1) * (PROMPT - LAST_PAGE)
    assert made == Served(checkpoint, prefix_cache=False).run(texts())
    assert len({tuple(tokens) for tokens in made}) == N


def test_with_few_rows_those_that_wait_find_it_cached(checkpoint):
    served = Served(checkpoint, max_running_requests=3)
    served.run(texts())
    assert served.prompt_tokens_run == PROMPT + (N - 1) * LAST_PAGE


def test_under_pressure_too(checkpoint):
    page = 16 * 2 * HIDDEN * 4
    served = Served(checkpoint, admission_policy="optimistic", kv_memory_bytes=page * (1 + 12 + N))
    made = served.run(texts())
    counters = served.conductor.counters
    assert counters.preemptions > 0
    assert made == Served(checkpoint, prefix_cache=False).run(texts())
    assert counters.prompt_tokens == N * PROMPT
    assert counters.cached_prompt_tokens == (N - 1) * (PROMPT - LAST_PAGE)
    assert served.prompt_tokens_run == PROMPT + (N - 1) * LAST_PAGE + counters.recomputed_tokens


def test_what_is_asked_of_the_prompts_tokens_is_computed_for_the_first_alone(checkpoint):
    served = Served(checkpoint)
    served.run(texts(num_prompt_logprobs=0))
    assert served.prompt_tokens_run == 2 * PROMPT + (N - 2) * LAST_PAGE


def test_without_the_cache_every_text_computes_it(checkpoint):
    served = Served(checkpoint)
    served.run(texts(no_cache=True))
    assert served.prompt_tokens_run == N * PROMPT
