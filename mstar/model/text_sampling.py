"""The end of a text model's step: from logits to tokens, in two captured variants.

The plain variant has the sampler alone.  The full one has everything else that a request may ask for; one row that
needs it takes its whole step there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mstar.engine.resources.grammar.config import GrammarSpec, GrammarStep, Vocabulary
from mstar.engine.resources.logit_edits.config import LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.logprobs.config import LogprobsSpec, LogprobsStep
from mstar.engine.resources.sampler.config import PlainSamplerStep, SamplerSpec, SamplerStep
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep, SlotLease

FULL = "full"  # the key info of the full variant; that of the plain one is None
VARIANTS = (None, FULL)
NEW_TOKEN, FAULT = "new_token", "fault"


MAX_REPETITION_WINDOW = 1024  # tokens; an entry of the sampler's ring each, for the rows that use one


def sampling_specs(
    nodes: set[str], vocab_size: int, eos_ids: Iterable[int], vocabulary: Callable[[], Vocabulary]
) -> list[NodeResourceSpec]:
    """The resources behind a head of ``vocab_size`` logits, with every capability."""
    return [
        LogprobsSpec("logprobs", nodes, vocab_size),
        LogitEditsSpec("logit_edits", nodes, vocab_size),
        GrammarSpec("grammar", nodes, vocab_size, vocabulary),
        SamplerSpec(
            "sampler",
            nodes,
            vocab_size=vocab_size,
            enable_min_p=True,
            max_repetition_window=MAX_REPETITION_WINDOW,
            min_tokens_stop_ids=tuple(sorted(eos_ids)),
            enable_top_p_first=True,
        ),
    ]


def variant_of(lease: SlotLease | None) -> str | None:
    """The captured variant of a step; an eager step does all there is."""
    return FULL if lease is None or lease.bucket.cg_key_info == FULL else None


def sampling_steps(sampler: SamplerStep, variant: str | None) -> dict[str, ResourceStep]:
    """What the step asks of the resources behind the head, by their keys."""
    if variant is None:
        fields = {each.name: getattr(sampler, each.name) for each in dataclasses.fields(sampler)}
        return {"sampler": PlainSamplerStep(**fields | {"apply_penalty": False})}
    return {
        "logprobs": LogprobsStep(),
        "logit_edits": LogitEditsStep(kept_rids=sampler.kept_rids),
        "grammar": GrammarStep(),
        "sampler": sampler,
    }


def sample(resources: Mapping[str, Any], logits: torch.Tensor, variant: str | None) -> dict[str, torch.Tensor]:
    """Draws a token per row of ``logits`` [rows, vocabulary], which may be changed in place.

    Returns:
        ``new_token`` int64 [rows]; ``fault`` int8 [rows], as
        :meth:`~mstar.engine.resources.sampler.manager.SamplerManager.faults` says; in the full variant also what
        :meth:`~mstar.engine.resources.logprobs.manager.Logprobs.of` tells, of the logits as they came.
    """
    sampler = resources["sampler"]
    if variant is None:
        return {NEW_TOKEN: sampler.sample(logits), FAULT: sampler.faults()}
    logprobs, edits = resources["logprobs"], resources["logit_edits"]
    logprobs.observe(logits)  # on a device they stay as they are: edits come in memory of their own
    tokens = sampler.sample(edits.hold_back(resources["grammar"].apply(edits.apply(logits))))
    edits.record(tokens)
    return {NEW_TOKEN: tokens, FAULT: sampler.faults(), **logprobs.of(tokens)}
