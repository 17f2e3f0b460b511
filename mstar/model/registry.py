"""From a model's name to its engine part."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch

from mstar.engine.resources.attention.config import AttentionBackend, AttentionConfig, AttentionSpec
from mstar.engine.resources.grammar.config import Vocabulary
from mstar.engine.resources.kv.config import NUM_RESERVED_PAGES, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.graph import EMIT_TO_CLIENT, EMPTY_DESTINATION, Edge, Loop, Node, Walk
from mstar.kernels.rope_frequencies import attention_factor, inverse_frequencies
from mstar.model.checkpoint import Checkpoint, open_checkpoint
from mstar.model.config import ModelConfig
from mstar.model.engine_model import EngineModel
from mstar.model.front import front_of
from mstar.model.loader import EMBEDDING, load_decoder
from mstar.model.memory import default_kv_bytes
from mstar.model.options import ModelLoadOptions
from mstar.model.text_llm import DECODE, NODE, PREFILL, TextLLM
from mstar.model.text_rows import LOOPBACK
from mstar.model.text_sampling import sampling_specs
from mstar.model.weights import WeightReader, choose_dtype, open_tensors
from mstar.utils.errors import LoadError

logger = logging.getLogger(__name__)


def load_model(name: str, *, device: torch.device, dtype: torch.dtype | None, options: ModelLoadOptions) -> EngineModel:
    """Loads the weights of a model and declares what its engine needs.

    Args:
        name: as :func:`mstar.model.checkpoint.open_checkpoint` takes it.
        dtype: of weights and activations; None chooses by device.

    Raises:
        LoadError: whatever is wrong with the checkpoint or an option; names the file and the tensor, or the option.
    """
    return model_of(open_checkpoint(name), device=device, dtype=dtype, options=options)


def model_of(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype | None, options: ModelLoadOptions
) -> EngineModel:
    """As :func:`load_model`, of an opened checkpoint."""
    config = checkpoint.config
    _check_rope(checkpoint)
    max_seq_len = _max_seq_len(config, options)
    source = open_tensors(checkpoint, device, options.load_format)
    entry = source.entries.get(EMBEDDING)
    dtype = choose_dtype(dtype, None if entry is None else entry.dtype, device)
    weights = WeightReader(source, dtype, device, options.keep_blocks)
    decoder = load_decoder(config, weights, deterministic=options.deterministic)
    kv_dtype = options.kv_dtype or dtype
    kv_config = size_kv(config, max_seq_len, kv_dtype, device, options)
    max_rows = options.max_running_requests
    submodule = TextLLM(
        decoder,
        max_rows=max_rows,
        max_tokens=min(options.max_batch_tokens, max_rows * max_seq_len),
        decode_sizes=options.capture_batch_sizes,
    )
    return EngineModel(
        name=checkpoint.name,
        submodules={NODE: submodule},
        resource_specs=resource_specs(
            config,
            kv_config,
            partial(_vocabulary, checkpoint),
            eos_ids=checkpoint.eos_ids,
            attention=attention_backend(device, dtype, kv_dtype),
            deterministic=options.deterministic,
        ),
        walks=text_walks(max_seq_len),
        walk_order=(PREFILL, DECODE),
        vocab_size=config.vocab_size,
        max_seq_len=max_seq_len,
        eos_ids=checkpoint.eos_ids,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
    )


def attention_backend(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionBackend:
    """The kernels that find pages and lengths on the device where they can run: captured steps then need no plan."""
    return AttentionBackend.TRITON if device.type == "cuda" and dtype == kv_dtype else AttentionBackend.SDPA


def text_walks(max_seq_len: int) -> list[Walk]:
    """``prefill``: the prompt to the first token.  ``decode``: a loop of one token each, fed back to the node."""
    to_client = Edge(EMIT_TO_CLIENT, "new_token", output_modality="text")
    prefill = Node(NODE, (LOOPBACK,), (to_client, Edge(EMPTY_DESTINATION, LOOPBACK, persist=True)))
    decode = Node(NODE, (LOOPBACK,), (to_client, Edge(NODE, LOOPBACK)))
    return [Walk(PREFILL, prefill), Walk(DECODE, Loop(decode, max_iters=max_seq_len, stop_signal="decode_loop"))]


def resource_specs(
    config: ModelConfig,
    kv: PagedKVConfig,
    vocabulary: Callable[[], Vocabulary],
    *,
    eos_ids: Iterable[int] = (),
    attention: AttentionBackend = AttentionBackend.SDPA,
    deterministic: bool = False,
) -> list[NodeResourceSpec]:
    """The resources of a text model's node."""
    rope = PositionConfig(
        rotary_dim=config.rotary_dim,
        rope_theta=config.rope_theta,
        rope_scaling=None if config.rope_scaling is None else dict(config.rope_scaling),
    )
    attending = AttentionConfig(backend=attention, sliding_window=config.sliding_window, deterministic=deterministic)
    return [
        PagedKVSpec("kv_cache", {NODE}, kv),
        AttentionSpec("attn", {NODE}, attending),
        PositionSpec("rope", {NODE}, rope),
        *sampling_specs({NODE}, config.vocab_size, eos_ids, vocabulary),
    ]


def _vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    front = front_of(checkpoint)
    tokenizer = front.tokenizer
    return Vocabulary(
        pieces=tokenizer.all_pieces()[: front.vocab_size],
        special_ids=tokenizer.special_ids,
        eos_ids=front.eos_ids,
    )


def size_kv(
    config: ModelConfig, max_seq_len: int, kv_dtype: torch.dtype, device: torch.device, options: ModelLoadOptions
) -> PagedKVConfig:
    """The paged cache that fits the memory budget, and no larger than the running requests can fill.

    Raises:
        LoadError: a budget holds no page; names the option.
    """
    kv = PagedKVConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_qo_heads=config.num_heads,
        max_seq_len=max_seq_len,
        page_size=options.page_size,
        prefix_cache=options.prefix_cache,
        admission_fit="sum" if options.reserves_pages else "none",
    )
    page_bytes = kv.page_bytes(kv_dtype.itemsize)
    useful = kv.max_pages_per_row * options.max_running_requests + NUM_RESERVED_PAGES
    budget = options.kv_memory_bytes
    if budget is None:
        budget = default_kv_bytes(useful * page_bytes, device)
    pages = pages_within(budget, page_bytes, useful)
    if pages - NUM_RESERVED_PAGES < kv.max_pages_per_row:
        tokens = (pages - NUM_RESERVED_PAGES) * kv.page_size
        logger.warning("the KV cache holds %d tokens, less than one sequence of %d", tokens, max_seq_len)
    host_pages = host_pages_within(options.kv_host_memory_bytes, page_bytes, useful - NUM_RESERVED_PAGES)
    return dataclasses.replace(kv, max_num_pages=pages, cpu_offload_pages=host_pages)


def pages_within(budget: int, page_bytes: int, useful: int) -> int:
    """Pages of a cache of ``budget`` bytes, ``useful`` at most.

    Raises:
        LoadError: the budget holds no page; names the option.
    """
    pages = min(budget // page_bytes, useful)
    if pages <= NUM_RESERVED_PAGES:
        least = (NUM_RESERVED_PAGES + 1) * page_bytes
        raise LoadError(f"kv_memory_bytes: must be at least {least} for this model, got {budget}")
    return pages


def host_pages_within(budget: int, page_bytes: int, useful: int) -> int:
    """Pages of ``budget`` bytes on the host, ``useful`` at most; none of 0 bytes.

    Raises:
        LoadError: the budget is above 0 and holds no page; names the option.
    """
    if 0 < budget < page_bytes:
        raise LoadError(f"kv_host_memory_bytes: must be 0 or at least {page_bytes} for this model, got {budget}")
    return min(budget // page_bytes, useful)


def _max_seq_len(config: ModelConfig, options: ModelLoadOptions) -> int:
    asked = options.max_seq_len
    if asked is None:
        return config.context_length
    if not 2 <= asked <= config.context_length:
        raise LoadError(f"max_seq_len: must be 2 to {config.context_length}, the model's context, got {asked}")
    return asked


def _check_rope(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    try:
        inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        attention_factor(config.rope_scaling)
    except ValueError as error:
        raise LoadError(f"{checkpoint.path}: {error}") from None
