"""Declarations of what to capture: whole forwards (batched, packed) and inner regions (piecewise).

Pure data: importing this module loads no kernels.  A configuration names a walk and the shapes to capture; the
runner turns it into buckets, static buffers and graphs.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from mstar.engine.resources.step import SubmoduleStep

# torch.compile's names; a fixed set, since asking Inductor for them would import it.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class AcceleratorGraphConfigType(Enum):
    """How the rows of a capture relate: only BASIC_BATCHED buckets can be found from a batch size alone."""

    BASIC_BATCHED = "basic_batched"
    FLASH_INFER_PACKED = "flash_infer_packed"


class PiecewiseConfigType(Enum):
    """How the rows of a captured region relate."""

    BATCHED = "batched"
    PACKED = "packed"


def check_compile_mode(mode: str | None) -> str | None:
    """Returns ``mode`` as it was given.

    Called when a config is built: at capture the failure would only drop the bucket and serve it eager.

    Raises:
        ValueError: ``mode`` is neither None nor one of torch.compile's modes.
    """
    if mode is not None and mode not in COMPILE_MODES:
        raise ValueError(f"compile_mode={mode!r} is not one of {', '.join(COMPILE_MODES)} or None")
    return mode


def distribute_tokens(total_tokens: int, bs: int) -> list[int]:
    """Splits ``total_tokens`` over ``bs`` rows, the whole remainder on the first: (10, 3) -> [4, 3, 3].

    Raises:
        ValueError: ``total_tokens`` < 0, or tokens without a row to take them.
    """
    _check_layout_arguments(total_tokens, bs)
    if bs == 0:
        return []
    each, rest = divmod(total_tokens, bs)
    return [each + rest] + [each] * (bs - 1)


def decode_rows_then_prompt(total_tokens: int, bs: int) -> list[int]:
    """``bs - 1`` rows of one token, then a prompt row of the rest: (10, 3) -> [1, 1, 8].

    The layout of a mixed step, for kernels that choose a path per row by its span.  With fewer tokens than rows
    it is :func:`distribute_tokens`.

    Raises:
        ValueError: ``total_tokens`` < 0, or tokens without a row to take them.
    """
    _check_layout_arguments(total_tokens, bs)
    if bs == 0 or total_tokens < bs:
        return distribute_tokens(total_tokens, bs)
    return [1] * (bs - 1) + [total_tokens - (bs - 1)]


def _check_layout_arguments(total_tokens: int, bs: int) -> None:
    if total_tokens < 0:
        raise ValueError(f"total_tokens must be >= 0, got {total_tokens}")
    if bs < 0 or (bs == 0 and total_tokens > 0):
        raise ValueError(f"bs must be >= 1 to hold {total_tokens} tokens, got {bs}")


class AcceleratorGraphConfig(ABC):
    """One capture of a submodule's method under ``capture_graph_walk``, for a grid of shapes.

    ``replay_graph_walks`` (falsy: the capture walk alone) may use the captured graphs; look-ups always include the
    capture walk.  ``additional_key_info`` tells two captures of one walk and shape apart.  The largest of
    ``capture_batch_sizes`` caps eager batches too unless ``caps_eager_batch_size`` is False.  ``input_seq_dims``
    names, per preprocess output, the dim that varies with the bucket.  Call by keyword: subclasses order some
    parameters differently.

    Raises:
        ValueError: an unknown ``compile_mode``, or a count that is no integer >= 1; names the parameter.
    """

    def __init__(
        self,
        capture_graph_walk: str,
        replay_graph_walks: list[str] | None = None,
        additional_key_info: Any | None = None,
        compile: bool = True,
        compile_mode: str | None = None,
        capture_batch_sizes: list[int] | None = None,
        capture_forward_method: str = "forward_batched",
        caps_eager_batch_size: bool = True,
        input_seq_dims: dict[str, int] | None = None,
    ) -> None:
        self.capture_graph_walk = capture_graph_walk
        self.replay_graph_walks = replay_graph_walks
        self.additional_key_info = additional_key_info
        self.compile = compile
        self.compile_mode = check_compile_mode(compile_mode)
        self.capture_batch_sizes = capture_batch_sizes
        self.capture_forward_method = capture_forward_method
        self.caps_eager_batch_size = caps_eager_batch_size
        self.input_seq_dims = input_seq_dims
        _check_counts("capture_batch_sizes", capture_batch_sizes)
        _check_names("replay_graph_walks", replay_graph_walks)
        _check_hashable("additional_key_info", additional_key_info)

    @abstractmethod
    def get_config_type(self) -> AcceleratorGraphConfigType:
        """Whether rows are equal (batched) or ragged on one token axis (packed)."""

    @abstractmethod
    def get_total_tokens(self, bs: int) -> list[int]:
        """Static-buffer tokens of every bucket with ``bs`` rows."""

    @abstractmethod
    def get_node_inputs(self, bs: int, num_tokens: int) -> list[NodeInputs]:
        """``bs`` dummy rows that together fill ``num_tokens``; ``(n, 0)`` gives the rows that pad a batch."""


class BatchedAcceleratorGraphConfig(AcceleratorGraphConfig):
    """Equal rows, each like ``single_request_inputs`` (decode).

    ``total_tokens_multiplier`` counts the labels planned per request, such as 2 for guided decoding: buffers need
    that many times the tokens while each label's span stays ``input_seq_len``.
    """

    def __init__(
        self,
        capture_graph_walk: str,
        single_request_inputs: NodeInputs,
        replay_graph_walks: list[str] | None = None,
        additional_key_info: Any | None = None,
        compile: bool = True,
        capture_batch_sizes: list[int] | None = None,
        capture_forward_method: str = "forward_batched",
        caps_eager_batch_size: bool = True,
        total_tokens_multiplier: int = 1,
        compile_mode: str | None = None,
        input_seq_dims: dict[str, int] | None = None,
    ) -> None:
        super().__init__(
            capture_graph_walk=capture_graph_walk,
            replay_graph_walks=replay_graph_walks,
            additional_key_info=additional_key_info,
            compile=compile,
            compile_mode=compile_mode,
            capture_batch_sizes=capture_batch_sizes,
            capture_forward_method=capture_forward_method,
            caps_eager_batch_size=caps_eager_batch_size,
            input_seq_dims=input_seq_dims,
        )
        self.single_request_inputs = single_request_inputs
        self.total_tokens_multiplier = _check_count("total_tokens_multiplier", total_tokens_multiplier)

    def get_config_type(self) -> AcceleratorGraphConfigType:
        return AcceleratorGraphConfigType.BASIC_BATCHED

    def get_total_tokens(self, bs: int) -> list[int]:
        return [self.single_request_inputs.input_seq_len * bs * self.total_tokens_multiplier]

    def get_node_inputs(self, bs: int, num_tokens: int) -> list[NodeInputs]:
        """``bs`` independent clones of the template; ``num_tokens`` is ignored, so padding claims full length."""
        return [_clone_inputs(self.single_request_inputs) for _ in range(bs)]


class PackedAcceleratorGraphConfig(AcceleratorGraphConfig):
    """Ragged rows on one token axis (prefill, mixed): batch sizes times ``capture_token_lengths`` buckets.

    ``make_node_input(length)`` makes one dummy row.  ``token_layout(total, bs)`` (default
    :func:`distribute_tokens`) splits a bucket over its rows and must accept a total of 0.
    """

    def __init__(
        self,
        capture_graph_walk: str,
        capture_token_lengths: list[int],
        make_node_input: Callable[[int], NodeInputs],
        replay_graph_walks: list[str] | None = None,
        additional_key_info: Any | None = None,
        compile: bool = True,
        capture_batch_sizes: list[int] | None = None,
        capture_forward_method: str = "forward_batched",
        caps_eager_batch_size: bool = True,
        total_tokens_multiplier: int = 1,
        compile_mode: str | None = None,
        input_seq_dims: dict[str, int] | None = None,
        token_layout: Callable[[int, int], list[int]] | None = None,
    ) -> None:
        super().__init__(
            capture_graph_walk=capture_graph_walk,
            replay_graph_walks=replay_graph_walks,
            additional_key_info=additional_key_info,
            compile=compile,
            compile_mode=compile_mode,
            capture_batch_sizes=capture_batch_sizes,
            capture_forward_method=capture_forward_method,
            caps_eager_batch_size=caps_eager_batch_size,
            input_seq_dims=input_seq_dims,
        )
        _check_counts("capture_token_lengths", capture_token_lengths)
        self.capture_token_lengths = capture_token_lengths
        self.make_node_input = make_node_input
        self.total_tokens_multiplier = _check_count("total_tokens_multiplier", total_tokens_multiplier)
        self.token_layout = token_layout

    def get_config_type(self) -> AcceleratorGraphConfigType:
        return AcceleratorGraphConfigType.FLASH_INFER_PACKED

    def get_total_tokens(self, bs: int) -> list[int]:
        return [length * self.total_tokens_multiplier for length in self.capture_token_lengths]

    def get_node_inputs(self, bs: int, num_tokens: int) -> list[NodeInputs]:
        """``bs`` rows whose lengths sum to ``num_tokens / total_tokens_multiplier``.

        Raises:
            ValueError: ``token_layout`` returned another number of rows, another sum, or a negative length.
        """
        total = num_tokens // self.total_tokens_multiplier
        lengths = (self.token_layout or distribute_tokens)(total, bs)
        if len(lengths) != bs or sum(lengths) != total or any(length < 0 for length in lengths):
            raise ValueError(f"token_layout({total}, {bs}) must give {bs} lengths >= 0 of sum {total}, got {lengths}")
        return [self.make_node_input(length) for length in lengths]


@dataclass
class PiecewiseCaptureShape:
    """One piecewise capture bucket; ``sum(seq_lens) == total_tokens``."""

    bs: int
    seq_lens: list[int]
    total_tokens: int


@dataclass
class PiecewiseCallInputs:
    """Everything a captured region is handed, at capture and at replay alike.

    Static inputs are read, never reassigned: the Python body runs at warm-up and capture only.
    """

    static_inputs: dict[str, Tensor]
    engine_inputs: ModelInputsFromEngine
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, Any]:
        """The engine's resources by key."""
        return self.engine_inputs.resources


@dataclass(kw_only=True)
class PiecewiseAcceleratorGraphConfig(ABC):
    """One inner callable of a submodule's forward, captured on its own; the code around it stays eager.

    ``make_static_inputs`` allocates the persistent inputs of one shape.  ``declare_step(request_ids, seq_lens)``
    over the padded batch lets the region own resources; with ``lease_before_step`` the outer step leaves those
    out, unless ``can_lease`` turns this batch down.

    Raises:
        ValueError: an unknown ``compile_mode``, or a count that is no integer >= 1; names the parameter.
    """

    capture_fn: Callable[[PiecewiseCallInputs], dict[str, Tensor]]
    make_static_inputs: Callable[[PiecewiseCaptureShape], dict[str, Tensor]]
    declare_step: Callable[[list[str], list[int]], SubmoduleStep | None] | None = None
    lease_before_step: bool = False
    can_lease: Callable[[list[NodeInputs]], bool] | None = None
    forward_kwargs: dict[str, Any] = field(default_factory=dict)
    capture_batch_sizes: list[int] | None = None
    compile: bool = False
    compile_mode: str | None = None

    def __post_init__(self) -> None:
        check_compile_mode(self.compile_mode)
        _check_counts("capture_batch_sizes", self.capture_batch_sizes)

    @abstractmethod
    def get_config_type(self) -> PiecewiseConfigType:
        """Whether the region's rows are equal or ragged."""

    @abstractmethod
    def get_capture_shapes(self, batch_sizes: list[int]) -> list[PiecewiseCaptureShape]:
        """The buckets to capture, for the batch sizes the runner resolved."""

    @abstractmethod
    def replay_seq_lens(self, shape: PiecewiseCaptureShape, seq_lens: list[int] | None, real_bs: int) -> list[int]:
        """Lengths to declare at replay, one per row of ``shape``."""


@dataclass(kw_only=True)
class PiecewiseBatchedConfig(PiecewiseAcceleratorGraphConfig):
    """Equal-length capture over static input ``[bs, seq_len, D]``: padding rows compute like real ones."""

    seq_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("seq_len", self.seq_len)

    def get_config_type(self) -> PiecewiseConfigType:
        return PiecewiseConfigType.BATCHED

    def get_capture_shapes(self, batch_sizes: list[int]) -> list[PiecewiseCaptureShape]:
        return [PiecewiseCaptureShape(bs, [self.seq_len] * bs, self.seq_len * bs) for bs in batch_sizes]

    def replay_seq_lens(self, shape: PiecewiseCaptureShape, seq_lens: list[int] | None, real_bs: int) -> list[int]:
        return list(shape.seq_lens)


@dataclass(kw_only=True)
class PiecewisePackedConfig(PiecewiseAcceleratorGraphConfig):
    """Ragged capture over static input ``[total_tokens, D]``: one graph per (bs, token bucket)."""

    total_tokens: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts("total_tokens", self.total_tokens)

    def get_config_type(self) -> PiecewiseConfigType:
        return PiecewiseConfigType.PACKED

    def get_capture_shapes(self, batch_sizes: list[int]) -> list[PiecewiseCaptureShape]:
        return [
            PiecewiseCaptureShape(bs, distribute_tokens(total, bs), total)
            for bs in batch_sizes
            for total in dict.fromkeys(self.total_tokens)
        ]

    def replay_seq_lens(self, shape: PiecewiseCaptureShape, seq_lens: list[int] | None, real_bs: int) -> list[int]:
        """The real lengths, then zeros up to ``shape.bs``.

        Raises:
            ValueError: no lengths, not one per real row, a negative one, more rows than the bucket, or more
                tokens than it.
        """
        if seq_lens is None:
            raise ValueError("a packed region needs seq_lens, got None")
        if len(seq_lens) != real_bs:
            raise ValueError(f"seq_lens must have {real_bs} entries, one per real row, got {len(seq_lens)}")
        if real_bs > shape.bs:
            raise ValueError(f"real_bs must be <= {shape.bs}, the bucket's rows, got {real_bs}")
        if min(seq_lens, default=0) < 0:
            raise ValueError(f"seq_lens must be >= 0, got {seq_lens}")
        if sum(seq_lens) > shape.total_tokens:
            raise ValueError(f"seq_lens must sum to <= {shape.total_tokens}, the bucket's tokens, got {sum(seq_lens)}")
        return list(seq_lens) + [0] * (shape.bs - real_bs)


def _check_count(name: str, value: int) -> int:
    """Returns ``value``; ValueError naming it unless it is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be >= 1 and an integer, got {shorten(value)}")
    return value


def _check_counts(name: str, values: list[int] | None) -> None:
    """ValueError naming the list unless it is one of integers >= 1, or None."""
    if values is None:
        return
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list of integers, got {shorten(values)}")
    for value in values:
        _check_count(name, value)


def _check_names(name: str, values: list[str] | None) -> None:
    if values is None:
        return
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of walks, got {shorten(values)}")


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"{name} must be hashable, as part of a bucket's key, got {shorten(value)}") from None


def _clone_inputs(inputs: NodeInputs) -> NodeInputs:
    """A copy that shares no tensor and no container; the subclass and its extra fields are kept."""
    clone = copy.copy(inputs)
    for entry in dataclasses.fields(clone):
        setattr(clone, entry.name, _clone_value(getattr(inputs, entry.name)))
    return clone


def _clone_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _clone_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_clone_value(item) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, set | frozenset):
        return type(value)(value)
    return value
