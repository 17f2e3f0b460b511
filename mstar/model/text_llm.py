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
from mstar.engine.resources.sampler.config import SamplerStep
from mstar.engine.resources.step import Segment, SlotLease, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.model.captures import text_graph_configs
from mstar.model.decoder import Decoder

LABEL = "main"
PREFILL, DECODE = "prefill", "decode"
LOOPBACK = "text_inputs"  # the input through which a sampled token comes back


class TextLLM(ARNodeSubmodule):
    """Embedding, decoder, head and sampler in one step.

    Walk ``prefill`` takes a request's prompt, ``decode`` the token that its sampler drew last, which stays on the
    device.  Outputs per row: ``new_token`` int64, and ``fault``: its logits were not finite.
    """

    reads_device_loopback = True

    def __init__(self, decoder: Decoder, *, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()) -> None:
        """``max_rows`` and ``max_tokens`` bound the captured steps; ``decode_sizes`` as in ``text_graph_configs``."""
        super().__init__()
        self.decoder = decoder
        self._shapes = (max_rows, max_tokens, decode_sizes)
        self._decode_row = ARNodeInputs(input_seq_len=1, walk=DECODE)

    def device_loopback_signals(self, graph_walk: str) -> frozenset[str]:
        return frozenset({LOOPBACK}) if graph_walk == DECODE else frozenset()

    def prepare_inputs(self, graph_walk: str, info: RequestInfo) -> NodeInputs | None:
        if graph_walk == DECODE:
            return self._decode_row
        assert info.prompt_ids is not None
        ids = torch.as_tensor(info.prompt_ids, dtype=torch.int64)
        length = ids.numel()
        return ARNodeInputs(input_ids=ids, input_seq_len=length, walk=graph_walk, chunk_total=length)

    def uniform_row_inputs(self, graph_walk: str) -> NodeInputs | None:
        return self._decode_row if graph_walk == DECODE else None

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
        segments = tuple(
            Segment(request_id, LABEL, row.input_seq_len) for request_id, row in zip(request_ids, inputs, strict=True)
        )
        steps = {
            "kv_cache": KVStep(),
            "attn": AttentionStep(causal=True),
            "rope": PositionStep(),
            "sampler": SamplerStep(),
        }
        return SubmoduleStep(steps=steps, segments=segments)

    def preprocess(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        if graph_walk == DECODE:
            return {"input_ids": engine_inputs.resources["sampler"].loopback_tokens()}
        rows = [row.input_ids for row in inputs if isinstance(row, ARNodeInputs) and row.input_ids is not None]
        return {"input_ids": torch.cat(rows).to(self.decoder.device, non_blocking=True)}

    def forward_batched(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, **tensors: Any
    ) -> BatchedModelOutput:
        resources = engine_inputs.resources
        sampler = resources["sampler"]
        logits = self.decoder(tensors["input_ids"], resources["attn"], resources["rope"])
        tokens = sampler.sample(logits)
        return BatchedModelOutput(check_stop_buffers={"new_token": tokens, "fault": sampler.faults()})

    def get_accelerator_graph_configs(self, device: torch.device) -> list[AcceleratorGraphConfig]:
        max_rows, max_tokens, decode_sizes = self._shapes
        return text_graph_configs(device, max_rows, max_tokens, decode_sizes)
