"""Made-up traces, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mstar.simulate.trace import NOBODY, Trace, make_trace

BURST = 32  # requests that come at once
TURNS = 8  # of a chat
THINK_S = 5.0  # mean time between an answer and the next turn
SPREAD = 1.0  # standard deviation of the logarithm of long-tailed lengths
GIANT_SHARE = 0.75  # of the context, the giant prompt


@dataclass(frozen=True)
class Ask:
    """What a trace is made of: ``rate`` requests per second on average, mean lengths, ``context``: most tokens that
    prompt and answer may have together.

    ``systems`` different system prompts of ``system_tokens`` on average stand before the prompts where there are any;
    the i-th is asked for in proportion to i ** -``system_skew``: as by Zipf with 1, all alike with 0; by ``together``
    requests at the same moment.
    """

    requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    context: int
    seed: int = 0
    systems: int = 8
    system_tokens: int = 1_000
    system_skew: float = 0.0
    together: int = 1


def poisson(ask: Ask) -> Trace:
    """Independent arrivals; lengths uniform from half the mean to one and a half."""
    rng = np.random.default_rng(ask.seed)
    return make_trace(_poisson_times(ask, rng), *_uniform_lengths(ask, rng, ask.requests))


def bursts(ask: Ask) -> Trace:
    """:data:`BURST` at the same moment, again and again."""
    rng = np.random.default_rng(ask.seed)
    groups = -(-ask.requests // BURST)
    times = np.cumsum(rng.exponential(BURST / ask.rate, groups)).repeat(BURST)[: ask.requests]
    return make_trace(times, *_uniform_lengths(ask, rng, ask.requests))


def long_tail(ask: Ask) -> Trace:
    """Lengths with a long tail: lognormal."""
    rng = np.random.default_rng(ask.seed)
    means = (ask.prompt_tokens, ask.output_tokens)
    lengths = [rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, ask.requests) for mean in means]
    return make_trace(_poisson_times(ask, rng), *_within(ask, *lengths))


def chats(ask: Ask) -> Trace:
    """Chats of :data:`TURNS` turns, each with all that was said before it; the first ones come as by Poisson.

    ``prompt_tokens`` is the mean of what a turn adds.  A chat that would leave the context ends.
    """
    rng = np.random.default_rng(ask.seed)
    number = -(-ask.requests // TURNS)
    said, answered = (each.reshape(number, TURNS) for each in _uniform_lengths(ask, rng, number * TURNS))
    before = np.cumsum(said + answered, axis=1) - said - answered
    starts = np.cumsum(rng.exponential(TURNS / ask.rate, number))
    due = rng.exponential(THINK_S, (number, TURNS))
    due[:, 0] = starts
    tickets = np.arange(number * TURNS).reshape(number, TURNS)
    follows = np.concatenate([np.full((number, 1), NOBODY), tickets[:, :-1]], axis=1)
    streams = np.repeat(np.arange(number), TURNS)
    whole = make_trace(due.ravel(), (before + said).ravel(), answered.ravel(), follows=follows.ravel(), streams=streams)
    fits = whole.prompt_tokens + whole.output_tokens <= ask.context  # of a chat its first turns
    return _only(whole, np.flatnonzero(fits)[: ask.requests])


def giant(ask: Ask) -> Trace:
    """As :func:`poisson`, but the prompt of the one in the middle takes most of the context."""
    rng = np.random.default_rng(ask.seed)
    times, (prompts, outputs) = _poisson_times(ask, rng), _uniform_lengths(ask, rng, ask.requests)
    prompts[ask.requests // 2] = int(GIANT_SHARE * ask.context)
    return make_trace(times, *_within(ask, prompts, outputs))


def systems(ask: Ask) -> Trace:
    """One of a few system prompts before each prompt; arrivals and lengths as of :func:`poisson`, but that several may
    come at once for one system prompt."""
    rng = np.random.default_rng(ask.seed)
    groups = -(-ask.requests // ask.together)
    times = np.cumsum(rng.exponential(ask.together / ask.rate, groups)).repeat(ask.together)[: ask.requests]
    shares = np.arange(1, ask.systems + 1) ** -ask.system_skew
    asked = rng.choice(ask.systems, groups, p=shares / shares.sum()).repeat(ask.together)[: ask.requests]
    lengths = np.rint(rng.uniform(0.5, 1.5, ask.systems) * ask.system_tokens).astype(np.int64)
    shared = np.clip(lengths, 1, max(ask.context - 2, 1))[asked]
    prompts, outputs = (rng.uniform(0.5, 1.5, ask.requests) * mean for mean in (ask.prompt_tokens, ask.output_tokens))
    prompts, outputs = _within(ask, shared + np.maximum(prompts, 1), outputs)
    return make_trace(times, prompts, outputs, systems=asked, system_tokens=np.minimum(shared, prompts))


SYNTHETIC: dict[str, Callable[[Ask], Trace]] = {
    "poisson": poisson,
    "bursts": bursts,
    "long-tail": long_tail,
    "chats": chats,
    "giant": giant,
    "systems": systems,
}


def with_tenants(trace: Trace, tenants: int, seed: int = 0) -> Trace:
    """The requests, or whole chats, dealt out to ``tenants`` of which number i asks for a share of 1 / i."""
    shares = 1 / np.arange(1, tenants + 1)
    _, stream_of = np.unique(trace.streams, return_inverse=True)
    dealt = np.random.default_rng(seed).choice(tenants, stream_of.max() + 1, p=shares / shares.sum())
    return replace(trace, tenants=dealt[stream_of], tenant_names=tuple(f"tenant {i + 1}" for i in range(tenants)))


def _poisson_times(ask: Ask, rng: np.random.Generator) -> np.ndarray:
    return np.cumsum(rng.exponential(1 / ask.rate, ask.requests))


def _uniform_lengths(ask: Ask, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    prompts, outputs = (rng.uniform(0.5, 1.5, count) * mean for mean in (ask.prompt_tokens, ask.output_tokens))
    return _within(ask, prompts, outputs)


def _within(ask: Ask, prompts: np.ndarray, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, at least 1, that the context has room for."""
    prompt_tokens = np.clip(np.rint(prompts), 1, ask.context - 1).astype(np.int64)
    return prompt_tokens, np.clip(np.rint(outputs), 1, ask.context - prompt_tokens).astype(np.int64)


def _only(trace: Trace, kept: np.ndarray) -> Trace:
    """Requests ``kept`` [n], ascending; of whatever they follow, all are kept."""
    place = np.full(len(trace) + 1, NOBODY)
    place[kept] = np.arange(kept.size)
    columns = {name: value[kept] for name, value in vars(trace).items() if isinstance(value, np.ndarray)}
    return replace(trace, **columns | {"follows": place[columns["follows"]]})
