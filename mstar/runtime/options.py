"""Options of an engine and of its front ends: the one table from which parsing, errors and documentation come."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from mstar.runtime.fields import FLOAT32_MAX, INT64_MAX, Field
from mstar.utils.errors import InvalidArgument, LoadError, shorten

ENGINE_OPTIONS: tuple[Field, ...] = (
    Field(
        name="model",
        kind="str",
        low=1,
        high=4096,
        doc="A folder, a .gguf file, a Hugging Face id, or an alias such as smollm2-135m.",
    ),
    Field(
        name="device", kind="str", default="auto", low=1, high=32, doc="auto (a GPU where there is one), cpu, cuda:N."
    ),
    Field(
        name="dtype",
        kind="str",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        doc="Type of weights and activations; auto is float32 on the CPU, the checkpoint's own on a GPU.",
    ),
    Field(
        name="kv_dtype",
        kind="str",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        doc="Type of the KV cache; auto follows dtype.",
    ),
    Field(
        name="quantised_weights",
        kind="str",
        default="auto",
        choices=("auto", "off"),
        doc="auto leaves Q4_0, Q4_1 and Q8_0 weights of a GGUF quantised on a float32 CPU and dequantises them as they "
        "are used: less memory read, same result; off dequantises all at load.",
    ),
    Field(
        name="load_format",
        kind="str",
        default="auto",
        choices=("auto", "dummy"),
        doc="dummy makes random weights on the device instead of reading any: to measure speed, a folder with "
        "config.json is enough.",
    ),
    Field(
        name="max_seq_len",
        kind="int",
        low=2,
        high=2**24,
        unit="tokens",
        doc="Context limit, prompt and generated tokens together. Unset: the model's own, which it cannot exceed.",
    ),
    Field(
        name="kv_memory_bytes",
        kind="bytes",
        low=1,
        high=2**50,
        unit="bytes",
        doc="Memory of the paged KV cache. Unset: what the running requests need at the context limit, capped.",
    ),
    Field(name="page_size", kind="int", default=16, low=1, high=1024, unit="tokens", doc="Tokens of one KV page."),
    Field(
        name="kv_host_memory_bytes",
        kind="bytes",
        default=0,
        low=0,
        high=2**50,
        unit="bytes",
        doc="Page-locked host memory for the pages of requests that have to wait for others: they go on bit for bit "
        "where they were. 0: their tokens are computed again.",
    ),
    Field(
        name="admission_policy",
        kind="str",
        default="reserve",
        choices=("reserve", "optimistic"),
        doc="What a request must find to run: all pages it may come to need (reserve), or its prompt's (optimistic): "
        "then more run at once, and when pages run out the newest of the lowest priority wait for the others.",
    ),
    Field(
        name="preemption",
        kind="str",
        default="auto",
        choices=("auto", "offload", "recompute"),
        doc="How a request that gave its pages up comes back: from the host, if kv_host_memory_bytes has room, or by "
        "running its tokens again. auto takes what has cost less.",
    ),
    Field(
        name="max_running_requests",
        kind="int",
        default=64,
        low=1,
        high=4096,
        unit="requests",
        doc="Requests that generate at the same time.",
    ),
    Field(
        name="max_queued_requests",
        kind="int",
        default=1024,
        low=0,
        high=2**24,
        unit="requests",
        doc="Requests that may wait for room; more are refused at once with UNAVAILABLE.",
    ),
    Field(
        name="max_queued_tokens",
        kind="int",
        default=0,
        low=0,
        high=INT64_MAX,
        unit="tokens",
        doc="Prompt tokens that may wait for room in all; 0 is no bound.",
    ),
    Field(
        name="max_queued_requests_per_tenant",
        kind="int",
        default=0,
        low=0,
        high=2**24,
        unit="requests",
        doc="Requests of one tenant that may wait for room, so that none fills the queue for others; 0 is no bound.",
    ),
    Field(
        name="max_batch_tokens",
        kind="int",
        default=2048,
        low=1,
        high=2**20,
        unit="tokens",
        doc="Prompt tokens that one step takes; a prompt that does not fit is split (see chunked_prefill).",
    ),
    Field(
        name="chunked_prefill",
        kind="bool",
        default=True,
        doc="Split a prompt over several steps where it does not fit; else one that is longer than max_batch_tokens "
        "has a step of its own, for which rows that generate wait.",
    ),
    Field(
        name="target_inter_token_ms",
        kind="float",
        default=0.0,
        low=0.0,
        high=60_000.0,
        unit="ms",
        doc="How long a step with rows that generate should take at most: parts of prompts beside them are made that "
        "small, learning from the steps before; 0 lets them fill max_batch_tokens.",
    ),
    Field(
        name="mixed_steps",
        kind="bool",
        default=True,
        doc="Run prompts in the same step as rows that generate, instead of in steps of their own.",
    ),
    Field(
        name="run_ahead",
        kind="str",
        default="auto",
        choices=("auto", "on", "off"),
        doc="Launch a step before the tokens of the one before reach the host; same tokens either way. auto is on "
        "where the device runs beside the host (a GPU).",
    ),
    Field(
        name="max_steps_ahead",
        kind="int",
        default=4,
        low=1,
        high=64,
        unit="steps",
        doc="With run_ahead, most steps launched before their tokens are read, while no request waits and all that "
        "the steps need is on the device. A request that ends or is cancelled runs along in as many.",
    ),
    Field(
        name="priority_ageing_s",
        kind="float",
        default=1.0,
        low=0.001,
        high=86400.0,
        unit="s",
        doc="A request that waits so long counts as one level of request_priority higher, and so on, up to the highest "
        "of those that wait; then the shares of the tenants decide.",
    ),
    Field(
        name="output_token_weight",
        kind="float",
        default=2.0,
        low=0.0,
        high=100.0,
        unit="prompt tokens",
        doc="What a generated token counts in the fair share between tenants; a prompt token counts 1, a cached one 0.",
    ),
    Field(
        name="prefix_passes",
        kind="int",
        default=8,
        low=0,
        high=2**20,
        unit="requests",
        doc="A request that waits may be passed by so many later ones of its tenant of whose prompt half or more is in "
        "the prefix cache; 0 keeps to the order of arrival.",
    ),
    Field(
        name="prefix_cache",
        kind="bool",
        default=True,
        doc="Keep the KV pages of finished requests and reuse them for prompts that begin alike.",
    ),
    Field(
        name="deterministic",
        kind="bool",
        default=False,
        doc="Make tokens equal bit for bit whatever else runs; slower (docs/performance.md).",
    ),
    Field(
        name="resources",
        kind="str",
        low=2,
        high=65536,
        doc='Settings of the model\'s resources in one JSON object, such as {"kv_cache": {"admission_fit": "peak"}}.',
    ),
    Field(
        name="capture_batch_sizes",
        kind="ints",
        default=(),
        low=1,
        high=4096,
        unit="rows",
        max_items=256,
        doc="Batch sizes of decode steps to capture. Unset: the device's own ladder.",
    ),
    Field(
        name="num_threads",
        kind="int",
        default=0,
        low=0,
        high=1024,
        unit="threads",
        doc="Threads of CPU computation; 0 is one per physical core.",
    ),
    Field(
        name="step_timeout_s",
        kind="float",
        default=60.0,
        low=1.0,
        high=86400.0,
        unit="s",
        doc="An engine that waits longer for a step (of max_batch_tokens), and 4 times the longest, ends itself.",
    ),
    Field(
        name="drain_timeout_s",
        kind="float",
        default=20.0,
        low=0.0,
        high=86400.0,
        unit="s",
        doc="How long requests may go on when the server stops or the model unloads; then they end with UNAVAILABLE.",
    ),
)

FRONT_OPTIONS: tuple[Field, ...] = (
    Field(
        name="engine",
        kind="str",
        low=1,
        high=256,
        doc="Name of the engine process, shared by entries that give the same one. Unset: the entry's name.",
    ),
    Field(
        name="default_max_tokens",
        kind="int",
        low=0,
        high=INT64_MAX,
        unit="tokens",
        doc="max_tokens of a request that gives none. Unset: the model's own, else what the context leaves.",
    ),
    Field(
        name="default_temperature",
        kind="float",
        low=0.0,
        high=FLOAT32_MAX,
        doc="temperature of a request that gives none. Unset: the model's own, else 0.6.",
    ),
    Field(
        name="default_top_k",
        kind="int",
        low=-1,
        high=INT64_MAX,
        doc="top_k of a request that gives none. Unset: the model's own, else off.",
    ),
    Field(
        name="default_top_p",
        kind="float",
        low=0.0,
        high=1.0,
        above_low=True,
        doc="top_p of a request that gives none. Unset: the model's own, else off.",
    ),
    Field(
        name="default_min_p",
        kind="float",
        low=0.0,
        high=1.0,
        doc="min_p of a request that gives none. Unset: the model's own, else off.",
    ),
    Field(
        name="default_repetition_penalty",
        kind="float",
        low=0.0,
        high=FLOAT32_MAX,
        above_low=True,
        doc="repetition_penalty of a request that gives none. Unset: the model's own, else off.",
    ),
    Field(
        name="max_n",
        kind="int",
        default=16,
        low=1,
        high=4096,
        unit="texts",
        doc="Most texts that one request may ask for (n).",
    ),
    Field(
        name="response_threads",
        kind="int",
        default=2,
        low=1,
        high=64,
        unit="threads",
        doc="Threads that send responses; more of them wait for one another.",
    ),
    Field(
        name="load_timeout_s",
        kind="float",
        default=1800.0,
        low=1.0,
        high=86400.0,
        unit="s",
        doc="Longest wait for the engine to load the model.",
    ),
)

OPTIONS: tuple[Field, ...] = ENGINE_OPTIONS + FRONT_OPTIONS
_BY_NAME: Mapping[str, Field] = {field.name: field for field in OPTIONS}


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """Coerces every value by its row of the table; LoadError names the option."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            msgspec.structs.force_setattr(self, name, _coerce(_BY_NAME[name], getattr(self, name)))


class EngineOptions(_Options, frozen=True, kw_only=True):
    """What an engine process is started with; see :data:`ENGINE_OPTIONS`.

    Raises:
        LoadError: a value is outside its contract.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantised_weights: str = "auto"
    load_format: str = "auto"
    max_seq_len: int | None = None
    kv_memory_bytes: int | None = None
    page_size: int = 16
    kv_host_memory_bytes: int = 0
    admission_policy: str = "reserve"
    preemption: str = "auto"
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    max_queued_tokens: int = 0
    max_queued_requests_per_tenant: int = 0
    max_batch_tokens: int = 2048
    chunked_prefill: bool = True
    target_inter_token_ms: float = 0.0
    mixed_steps: bool = True
    run_ahead: str = "auto"
    max_steps_ahead: int = 4
    priority_ageing_s: float = 1.0
    output_token_weight: float = 2.0
    prefix_passes: int = 8
    prefix_cache: bool = True
    deterministic: bool = False
    resources: str | None = None
    capture_batch_sizes: tuple[int, ...] = ()
    num_threads: int = 0
    step_timeout_s: float = 60.0
    drain_timeout_s: float = 20.0

    def key(self) -> str:
        """12 hex digits that two engines share only if all their options agree."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


class FrontOptions(_Options, frozen=True, kw_only=True):
    """What a front end decides by itself; see :data:`FRONT_OPTIONS`."""

    engine: str | None = None
    default_max_tokens: int | None = None
    default_temperature: float | None = None
    default_top_k: int | None = None
    default_top_p: float | None = None
    default_min_p: float | None = None
    default_repetition_penalty: float | None = None
    max_n: int = 16
    response_threads: int = 2
    load_timeout_s: float = 1800.0


def parse_options(mapping: Mapping[str, Any]) -> tuple[EngineOptions, FrontOptions]:
    """Options from their names and values, as a config.pbtxt or a call gives them.

    A value that is None, empty, or an unfilled ``${...}`` counts as unset.

    Raises:
        LoadError: an unknown name, a value outside its contract, or no ``model``.
    """
    given = {name: value for name, value in mapping.items() if not _is_unset(value)}
    for name in mapping:
        if name not in _BY_NAME:
            near = difflib.get_close_matches(str(name)[:64], _BY_NAME, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise LoadError(f"option {shorten(name)[1:-1]} is unknown{hint}")
    if "model" not in given:
        raise LoadError("option model is missing: " + _BY_NAME["model"].doc)
    engine = {name: given[name] for name in EngineOptions.__struct_fields__ if name in given}
    front = {name: given[name] for name in FrontOptions.__struct_fields__ if name in given}
    return EngineOptions(**engine), FrontOptions(**front)


def _coerce(field: Field, value: Any) -> Any:
    try:
        return field.coerce(value)
    except InvalidArgument as error:
        raise LoadError(f"option {error}") from None


def _is_unset(value: Any) -> bool:
    if isinstance(value, str):
        text = value.strip()
        return not text or (text.startswith("${") and text.endswith("}"))
    return value is None
