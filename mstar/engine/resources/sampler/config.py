"""What a model declares about sampling: its spec, its per-request config, its step.  No kernels."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep
from mstar.utils import knobs
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    import torch

    from mstar.engine.resources.base import Resource

MOST_WINDOW = 2**20  # tokens
_SMALLEST, _LARGEST = math.nextafter(0.0, 1.0), sys.float_info.max  # what is above 0, and finite


def derive_seed(seed: int, stream: str) -> int:
    """A seed for one named stream of a request, as a non-negative int64.

    BLAKE2b with an 8-byte digest over ``"<seed>:<stream>"``, little-endian, masked to 63 bits: stable across
    processes, and distinct per stream, so a request's samplers do not draw correlated numbers from one seed.
    """
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


@dataclass(frozen=True)
class SamplerSpec(NodeResourceSpec):
    """A sampler and its capabilities: what captured steps have buffers for, not what a request wants.

    ``vocab_size`` is the width of the logits; None where it is known from the first draw only, and then no captured
    step may have a repetition penalty.  ``max_repetition_window``: tokens of the longest ``repetition_window``.
    ``min_tokens_stop_ids`` cannot be drawn before a request's ``min_tokens``.

    Raises:
        ValueError: a number or an id outside its range.
    """

    vocab_size: int | None
    enable_repetion_penalty: bool = True
    enable_min_p: bool = False
    max_repetition_window: int = 0
    min_tokens_stop_ids: tuple[int, ...] = ()
    enable_top_p_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "min_tokens_stop_ids", tuple(self.min_tokens_stop_ids))
        _check_int("vocab_size", self.vocab_size, 1)
        _check_int("max_repetition_window", self.max_repetition_window, 0, MOST_WINDOW)
        for token_id in self.min_tokens_stop_ids:
            _check_int("min_tokens_stop_ids", token_id, 0, None if self.vocab_size is None else self.vocab_size - 1)

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.sampler.manager import SamplerManager

        return SamplerManager

    def max_requests(self) -> int | None:
        """``MSTAR_SAMPLER_SLOTS`` where captured steps address the masters themselves, which cannot grow then."""
        return knobs.sampler_slots() if knobs.sampler_ingraph_scatter() else None

    def apply_yaml_overrides(self, **overrides: Any) -> SamplerSpec:
        """The spec with another ``max_repetition_window``; what else a sampler can do is the model's to say."""
        others = sorted(overrides.keys() - {"max_repetition_window"})
        if others:
            raise TypeError(f"a sampler takes max_repetition_window only, got {', '.join(others)}")
        return replace(self, **overrides)


@dataclass
class SamplingReqConfig(ResourceReqConfig):
    """How one request is sampled.  None in any field stands for the default.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1,
    ``repetition_window`` 0 and ``min_tokens`` 0 are off.  ``ignore_eos`` is read by stop checks only.
    """

    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 1
    ignore_eos: bool = False
    repetition_penalty: float = 1
    min_p: float = 0.0
    repetition_window: int = 0
    min_tokens: int = 0
    top_p_first: bool = False
    top_p_min_keep: int = 1
    penalize_prompt: bool = True
    _seed: int = 0

    @property
    def seed(self) -> int:
        """The seed of this sampler's draws; set by :meth:`apply_conductor_config`."""
        return self._seed

    def apply_conductor_config(self, seed: int = 0, resource_key: str | None = None, **kwargs: Any) -> None:
        """Takes the request's seed; with ``resource_key`` each sampler of a request gets a stream of its own."""
        self._seed = seed if resource_key is None else derive_seed(seed, resource_key)

    @property
    def needs_full_variant(self) -> bool:
        return self.repetition_penalty not in (None, 1) or (self.min_tokens or 0) > 0

    def without_none(self) -> SamplingReqConfig:
        """The config with every None made the default it stands for; itself where there is none."""
        fields = vars(self)
        if None not in fields.values():
            return self
        return SamplingReqConfig(**{name: value for name, value in fields.items() if value is not None})

    def validate(self, spec: SamplerSpec | None = None) -> None:
        """Raise ValueError on a value outside the contract, or one spec's node cannot honour.

        None means the sampler's default.
        """
        self._check_ranges()
        if spec is not None:
            self._check_capabilities(spec)

    def _check_ranges(self) -> None:
        _check_real("temperature", self.temperature, "must be a finite number >= 0", 0, _LARGEST)
        _check_real("top_p", self.top_p, "must be a finite number in (0, 1]", _SMALLEST, 1)
        _check_real("min_p", self.min_p, "must be a finite number in [0, 1]", 0, 1)
        _check_real("repetition_penalty", self.repetition_penalty, "must be > 0 and finite", _SMALLEST, _LARGEST)
        _check_int("top_k", self.top_k, 0)
        _check_int("repetition_window", self.repetition_window, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_int("top_p_min_keep", self.top_p_min_keep, 1)
        for name in ("ignore_eos", "penalize_prompt", "top_p_first"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise _refusal(name, "must be true or false", value)

    def _check_capabilities(self, spec: SamplerSpec) -> None:
        window = self.repetition_window or 0
        if self.min_p and not spec.enable_min_p:
            raise _refusal("min_p", "must be 0: this model's sampler has enable_min_p=False", self.min_p)
        if self.repetition_penalty not in (None, 1) and not spec.enable_repetion_penalty and window == 0:
            allowed = "must be 1: this model's sampler has enable_repetion_penalty=False"
            raise _refusal("repetition_penalty", allowed, self.repetition_penalty)
        if window > spec.max_repetition_window:
            allowed = f"must be at most max_repetition_window={spec.max_repetition_window}"
            raise _refusal("repetition_window", allowed, window)
        if (self.min_tokens or 0) > 0 and not spec.min_tokens_stop_ids:
            raise _refusal("min_tokens", "must be 0: this model's sampler has no min_tokens_stop_ids", self.min_tokens)
        if not spec.enable_top_p_first:
            if self.top_p_first:
                allowed = "must be false: this model's sampler has enable_top_p_first=False"
                raise _refusal("top_p_first", allowed, self.top_p_first)
            if (self.top_p_min_keep or 1) > 1:
                allowed = "must be 1: this model's sampler has enable_top_p_first=False"
                raise _refusal("top_p_min_keep", allowed, self.top_p_min_keep)


@dataclass(frozen=True)
class SamplerStep(ResourceStep):
    """One draw per row.

    ``apply_penalty`` False leaves the repetition penalties out; what is drawn still counts for later steps.
    ``apply_filters`` False ignores top-k and top-p.  ``prefill_tracked_tokens``: request id -> 1-D prompt ids of
    the step, for the presence penalty.  ``kept_rids`` None keeps every row's draw; a row that is not in the set
    still draws, but neither its draw count, nor its last token, nor its history moves.
    """

    looks_back: ClassVar[bool] = True

    apply_penalty: bool = True
    apply_filters: bool = True
    prefill_tracked_tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    kept_rids: frozenset[int] | None = None


@dataclass(frozen=True)
class PlainSamplerStep(SamplerStep):
    """Of rows without a penalty or a least length: captured on a device, it has no kernels for them."""

    looks_back: ClassVar[bool] = False


def narrow_to_final(step: SamplerStep, request_ids: Sequence[int], inputs: Sequence[Any]) -> SamplerStep:
    """The step with only those draws kept that end a prompt or follow one; the same step when all do.

    ``inputs``: one per request id; those with ``is_final_chunk`` False are the non-final chunks of a prompt.
    """
    is_kept = [getattr(row, "is_final_chunk", True) for row in inputs]
    if all(is_kept):
        return step
    kept = frozenset(request_id for request_id, keep in zip(request_ids, is_kept, strict=True) if keep)
    return replace(step, kept_rids=kept if step.kept_rids is None else kept & step.kept_rids)


def _check_real(name: str, value: Any, allowed: str, low: float, high: float) -> None:
    """Refuses what is no number, or does not lie in ``low .. high``; a NaN lies nowhere."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _refusal(name, allowed, value)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuses what is no integer, or lies outside ``low .. high``."""
    if value is None:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        bound = "" if high is None else f" and <= {high}"
        raise _refusal(name, f"must be an integer >= {low}{bound}", value)


def _refusal(name: str, allowed: str, value: Any) -> ValueError:
    return ValueError(f"{name} {allowed}, got {shorten(value)}")
