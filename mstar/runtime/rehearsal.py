"""Requests that an engine runs by itself before it serves: what is made at first use is there for the first client.

That is what no capture covers: kernels and libraries of joining, committing and leaving, page-locked buffers, graphs
that a device sends over at their first launch, the tracing of Python code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.report import StepReport
from mstar.conductor.request import EngineRequest, LogitEdits
from mstar.runtime.core import EngineCore
from mstar.utils.errors import MstarError

log = logging.getLogger(__name__)

PROMPT_TOKENS = 8
OUTPUT_TOKENS = 6  # with the prompt less than a page of the default size: nothing stays in the prefix cache


@torch.inference_mode()
def rehearse(core: EngineCore) -> None:
    """Runs a few short requests: one alone, then beside others that sample and use every optional part of a step.

    They leave no trace in the engine's and the conductor's counters.  What fails is logged: a client's own request may
    well succeed where these did not.
    """
    started = time.monotonic()
    conductor = Conductor(core.engine, core.model, core.conductor.limits)  # of its own, for its counters
    num_steps = 0
    for request in requests_for(core.info.max_seq_len, core.info.vocab_size):
        try:
            conductor.submit(request)
        except MstarError as error:  # a model without the part, or a tiny KV cache
            log.info("rehearsed without a request that is refused: %s", error)
        for _ in range(2):
            num_steps += _stepped(conductor.step())
    while conductor.has_work() and core.engine.device_failure is None:
        num_steps += _stepped(conductor.step())
    for counter in (core.engine.steps, core.engine.eager_steps, core.engine.counters):
        counter.clear()
    log.info("rehearsed %d steps in %.2f s", num_steps, time.monotonic() - started)


def requests_for(max_seq_len: int, vocab_size: int) -> Iterator[EngineRequest]:
    """Greedy, sampled, and one with all that a step can be asked for, as short as the context needs."""
    num_prompt = min(PROMPT_TOKENS, max_seq_len - 1)
    prompt = (np.arange(num_prompt) % vocab_size).astype("<i4").tobytes()
    length = min(OUTPUT_TOKENS, max_seq_len - num_prompt)
    yield EngineRequest(prompt_ids=prompt, max_tokens=length, temperature=0.0, ignore_eos=True)
    yield EngineRequest(
        prompt_ids=prompt, max_tokens=length, temperature=0.8, top_k=20, top_p=0.9, seed=1, ignore_eos=True
    )
    yield EngineRequest(
        prompt_ids=prompt,
        max_tokens=length,
        temperature=0.8,
        min_p=0.01,
        repetition_penalty=1.1,
        edits=LogitEdits(presence_penalty=0.1, frequency_penalty=0.1, bias=((0, 0.5),)),
        num_logprobs=1,
        seed=1,
        ignore_eos=True,
    )


def _stepped(report: StepReport) -> bool:
    """Whether a step was launched; failures are logged."""
    for failure in report.failures:
        log.warning("a rehearsed request failed: %s", failure.message)
    if report.is_empty and not report.num_stepped:
        time.sleep(0.001)  # what is waited for needs the cores
    return report.num_stepped > 0
