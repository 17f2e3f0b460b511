"""The node of a text model: one submodule from token ids to the next token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig
from mstar.engine.inputs import ARNodeInputs, ModelInputsFromEngine, NodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.logprobs.config import LogprobsReqConfig
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.sampler.config import SamplerStep, narrow_to_final
from mstar.engine.resources.step import ResourceStep, SlotLease, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.model.captures import text_graph_configs
from mstar.model.decoder import Decoder
from mstar.model.text_rows import LOOPBACK, collate, decode_row, num_decode_rows, prompt_row, split_row
from mstar.model.text_sampling import FULL, NEW_TOKEN, VARIANTS, sample, sampling_steps, variant_of
from mstar.utils import knobs

NODE = "LLM"
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
LOGPROBS = "logprobs"
_is_final = attrgetter("is_final_chunk")


class TextLLM(ARNodeSubmodule):
    """Embedding, decoder, head and sampler in one step.

    Walk ``prefill`` takes a request's prompt, ``decode`` the token that its sampler drew last, ``mixed`` rows of
    both, those of ``decode`` first.  Drawn tokens stay on the device: with ``MSTAR_DEVICE_LOOPBACK`` (read here, once)
    in the sampler, else as a tensor per row.  With ``MSTAR_INGRAPH_DECODE_TOKENS`` a captured decode step has no
    inputs: its forward takes the tokens from the sampler.  Outputs per row: those of
    :func:`mstar.model.text_sampling.sample`.
    """

    supports_chunked_prefill = True

    def __init__(self, decoder: Decoder, *, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()) -> None:
        """``max_rows`` and ``max_tokens`` bound the captured steps; ``decode_sizes`` as in ``text_graph_configs``."""
        super().__init__()
        self.decoder = decoder
        self.reads_device_loopback = knobs.device_loopback_enabled()
        self._shapes = (max_rows, max_tokens, decode_sizes)
        self._decode_row = decode_row(DECODE)
        # Without segments: every row the tokens of its inputs.
        self._steps = {variant: _step(SamplerStep(), variant) for variant in VARIANTS}

    def get_combined_graph_walks(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {NODE: {MIXED: (DECODE, PREFILL)}}

    def device_loopback_signals(self, graph_walk: str) -> frozenset[str]:
        return frozenset({LOOPBACK}) if graph_walk == DECODE else frozenset()

    def loopback_outputs(self) -> dict[str, str]:
        return {LOOPBACK: NEW_TOKEN}

    def prepare_inputs(self, graph_walk: str, info: RequestInfo) -> NodeInputs | None:
        if graph_walk == DECODE:
            return self._decode_row
        assert info.prompt_ids is not None
        return prompt_row(info.prompt_ids, graph_walk, info.is_resumed)

    def uniform_row_inputs(self, graph_walk: str) -> NodeInputs | None:
        return self._decode_row if self.reads_device_loopback and graph_walk == DECODE else None

    def split_inputs(self, inputs: NodeInputs, num_tokens: int) -> tuple[NodeInputs, NodeInputs]:
        assert isinstance(inputs, ARNodeInputs)
        return split_row(inputs, num_tokens)

    def max_batch_size(self, graph_walk: str) -> int | None:
        return self._shapes[0]

    def chooses_capture(self, info: RequestInfo) -> bool:
        return info.needs_full_variant or LOGPROBS in info.resource_configs

    def cg_key_info(self, graph_walk: str, infos: Sequence[RequestInfo]) -> str | None:
        return FULL if any(info.needs_full_variant for info in infos) else None

    def eager_reason(self, graph_walk: str, infos: Sequence[RequestInfo]) -> str | None:
        # The head over every token of a prompt, for the few that ask: no capture has room for that.
        if graph_walk == DECODE:
            return None
        return "prompt_logprobs" if any(map(_asks_about_prompt, infos)) else None

    def declare_step(
        self,
        graph_walk: str,
        request_ids: Sequence[int],
        inputs: Sequence[NodeInputs],
        slot_lease: SlotLease | None = None,
        piecewise_leases: Mapping[str, SlotLease] | None = None,
    ) -> SubmoduleStep | None:
        variant = variant_of(slot_lease)
        if graph_walk == DECODE:
            return self._steps[variant]
        prompts = slice(num_decode_rows(inputs), bisect_left(request_ids, True, key=_is_padding))
        tracked = {} if variant is None else _prompt_ids(request_ids[prompts], inputs[prompts])
        if not tracked and all(map(_is_final, inputs[prompts])):
            return self._steps[variant]
        return _step(narrow_to_final(SamplerStep(prefill_tracked_tokens=tracked), request_ids, inputs), variant)

    def preprocess(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        last_tokens = engine_inputs.resources["sampler"].loopback_tokens if self.reads_device_loopback else None
        if graph_walk == DECODE and last_tokens is not None:
            in_graph = engine_inputs.resources["sampler"].last_tokens_in_graph() is not None
            return {} if in_graph else {"input_ids": last_tokens()}
        return {"input_ids": collate(inputs, last_tokens, self.decoder.device)}

    def static_inputs(self, graph_walk: str) -> frozenset[str]:
        return frozenset({"input_ids"}) if self.reads_device_loopback and graph_walk == DECODE else frozenset()

    def forward_batched(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, **tensors: Any
    ) -> BatchedModelOutput:
        resources = engine_inputs.resources
        attn, rope = resources["attn"], resources["rope"]
        x = self._embedded(resources["sampler"], tensors.get("input_ids"))
        variant = variant_of(engine_inputs.ctx.slot_lease)
        of_prompts: dict[int, dict[str, list[torch.Tensor]]] = {}
        if variant == FULL and resources["logprobs"].wants_prompt:
            hidden = self.decoder.hidden(x, attn, rope, only_last=False)
            of_prompts = resources["logprobs"].of_prompts(hidden, self.decoder.head)
            logits = self.decoder.head(attn.last_rows(hidden))
        else:
            logits = self.decoder(x, attn, rope)
        return BatchedModelOutput(per_rid_outputs=of_prompts, check_stop_buffers=sample(resources, logits, variant))

    def _embedded(self, sampler: Any, ids: torch.Tensor | None) -> torch.Tensor:
        """Embeddings [tokens, hidden] of ``ids``, or without them of each row's last token."""
        if ids is not None:
            return self.decoder.embedding(ids)
        last_token, index = sampler.last_tokens_in_graph()
        return self.decoder.embedding.of_last(last_token, index)

    def get_accelerator_graph_configs(self, device: torch.device) -> list[AcceleratorGraphConfig]:
        max_rows, max_tokens, decode_sizes = self._shapes
        return text_graph_configs(device, max_rows, max_tokens, decode_sizes)


def _is_padding(request_id: int) -> bool:
    return request_id < 0  # behind all others


def _asks_about_prompt(info: RequestInfo) -> bool:
    config = info.resource_configs.get(LOGPROBS)
    return isinstance(config, LogprobsReqConfig) and config.num_prompt_top >= 0 and not info.is_resumed


def _prompt_ids(request_ids: Sequence[int], inputs: Sequence[NodeInputs]) -> dict[Any, torch.Tensor]:
    """Of rows that bring a part of their prompt for the first time."""
    rows = zip(request_ids, inputs, strict=True)
    return {
        i: row.input_ids
        for i, row in rows
        if isinstance(row, ARNodeInputs) and row.input_ids is not None and not row.is_resumed
    }


def _step(sampler: SamplerStep, variant: str | None) -> SubmoduleStep:
    steps: dict[str, ResourceStep] = {
        "kv_cache": KVStep(),
        "attn": AttentionStep(causal=True),
        "rope": PositionStep(),
        **sampling_steps(sampler, variant),
    }
    return SubmoduleStep(steps=steps, cg_key_info=variant)
