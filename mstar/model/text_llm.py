"""The node of a text model: one submodule from token ids to the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig
from mstar.engine.inputs import ARNodeInputs, ModelInputsFromEngine, NodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.sampler.config import SamplerStep, narrow_to_final
from mstar.engine.resources.step import MAIN_LABEL, Segment, SlotLease, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.model.captures import text_graph_configs
from mstar.model.decoder import Decoder
from mstar.model.text_rows import LOOPBACK, collate, decode_row, prompt_row, split_row
from mstar.utils import knobs

NODE = "LLM"
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
NEW_TOKEN, FAULT = "new_token", "fault"


class TextLLM(ARNodeSubmodule):
    """Embedding, decoder, head and sampler in one step.

    Walk ``prefill`` takes a request's prompt, ``decode`` the token that its sampler drew last, ``mixed`` rows of
    both, those of ``decode`` first.  Drawn tokens stay on the device: with ``MSTAR_DEVICE_LOOPBACK`` (read here, once)
    in the sampler, else as a tensor per row.  Outputs per row: ``new_token`` int64, and ``fault``: its logits were
    not finite.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()) -> None:
        """``max_rows`` and ``max_tokens`` bound the captured steps; ``decode_sizes`` as in ``text_graph_configs``."""
        super().__init__()
        self.decoder = decoder
        self.reads_device_loopback = knobs.device_loopback_enabled()
        self._shapes = (max_rows, max_tokens, decode_sizes)
        self._decode_row = decode_row(DECODE)
        self._decode_step = _step(SamplerStep(), None)  # without segments: every row its one token

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
        return prompt_row(info.prompt_ids, graph_walk)

    def uniform_row_inputs(self, graph_walk: str) -> NodeInputs | None:
        return self._decode_row if self.reads_device_loopback and graph_walk == DECODE else None

    def split_inputs(self, inputs: NodeInputs, num_tokens: int) -> tuple[NodeInputs, NodeInputs]:
        assert isinstance(inputs, ARNodeInputs)
        return split_row(inputs, num_tokens)

    def max_batch_size(self, graph_walk: str) -> int | None:
        return self._shapes[0]

    def declare_step(
        self,
        graph_walk: str,
        request_ids: Sequence[int],
        inputs: Sequence[NodeInputs],
        slot_lease: SlotLease | None = None,
        piecewise_leases: Mapping[str, SlotLease] | None = None,
    ) -> SubmoduleStep | None:
        if graph_walk == DECODE:
            return self._decode_step
        segments = tuple(
            [Segment(i, MAIN_LABEL, row.input_seq_len) for i, row in zip(request_ids, inputs, strict=True)]
        )
        return _step(narrow_to_final(SamplerStep(segments), request_ids, inputs), segments)

    def preprocess(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        last_tokens = engine_inputs.resources["sampler"].loopback_tokens if self.reads_device_loopback else None
        if graph_walk == DECODE and last_tokens is not None:
            return {"input_ids": last_tokens()}
        return {"input_ids": collate(inputs, last_tokens, self.decoder.device)}

    def static_inputs(self, graph_walk: str) -> frozenset[str]:
        return frozenset({"input_ids"}) if self.reads_device_loopback and graph_walk == DECODE else frozenset()

    def forward_batched(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, **tensors: Any
    ) -> BatchedModelOutput:
        resources = engine_inputs.resources
        sampler = resources["sampler"]
        logits = self.decoder(tensors["input_ids"], resources["attn"], resources["rope"])
        tokens = sampler.sample(logits)
        return BatchedModelOutput(check_stop_buffers={NEW_TOKEN: tokens, FAULT: sampler.faults()})

    def get_accelerator_graph_configs(self, device: torch.device) -> list[AcceleratorGraphConfig]:
        max_rows, max_tokens, decode_sizes = self._shapes
        return text_graph_configs(device, max_rows, max_tokens, decode_sizes)


def _step(sampler: SamplerStep, segments: tuple[Segment, ...] | None) -> SubmoduleStep:
    """Handed to each resource here, for the step would have to copy them all to do so."""
    steps = {
        "kv_cache": KVStep(segments),
        "attn": AttentionStep(segments, causal=True),
        "rope": PositionStep(segments),
        "sampler": sampler,
    }
    return SubmoduleStep(steps=steps, segments=segments)
