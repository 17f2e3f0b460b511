"""Persistent inputs of captured forwards: one allocation per (configuration, input name), shared by its buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class _Buffer:
    """``storage`` lies varying-dim-first, [max length, *rest]; ``dim`` is where that dim belongs in a forward.

    ``heads``: views of it that steps were staged into, by length.
    """

    storage: torch.Tensor
    dim: int
    trailing: tuple[int, ...]
    heads: dict[int, torch.Tensor] = field(default_factory=dict)


class StaticBuffers:
    """Interns tensors as leading slices of shared buffers, so that all buckets of a configuration share addresses."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._per_capture_bytes = 0

    def intern(
        self,
        config_idx: int,
        name: str,
        tensor: torch.Tensor,
        num_tokens: int,
        max_tokens: int,
        seq_dims: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        """The static view that stands for ``tensor`` in a capture, holding a copy of its contents.

        The first call for a name fixes its varying dim (``seq_dims[name]``, else the first dim of size
        ``num_tokens``, else 0), its other dims, and its length: the tensor's own, or where that is a multiple of
        ``num_tokens``, that multiple of ``max_tokens``, the configuration's largest bucket.

        Raises:
            RuntimeError: a later tensor is longer than the buffer or differs in another dim.
        """
        self._per_capture_bytes += tensor.numel() * tensor.element_size()
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
            return self._view(self._get(config_idx, name, tensor, 0, 1), tensor).copy_(tensor).reshape(())
        dim = self._varying_dim(name, tensor, num_tokens, seq_dims)
        length = tensor.shape[dim]
        if num_tokens and length % num_tokens == 0:
            length = max(length, length // num_tokens * max_tokens)
        return self._view(self._get(config_idx, name, tensor, dim, length), tensor).copy_(tensor)

    def narrowed(self, config_idx: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The leading part of a buffer in the shape of ``tensor``, its contents copied in."""
        if tensor.dim() == 0:
            return self._buffers[config_idx, name].storage.copy_(tensor).reshape(())
        return self._view(self._buffers[config_idx, name], tensor).copy_(tensor)

    def stage(self, config_idx: int, name: str, view: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies ``tensor`` into the head of a bucket's ``view``; the tail keeps its old contents."""
        if view.shape != tensor.shape:
            buffer = self._buffers[config_idx, name]
            length = tensor.shape[buffer.dim]
            head = buffer.heads.get(length)
            if head is None:
                head = buffer.heads[length] = view.narrow(buffer.dim, 0, length)
            view = head
        view.copy_(tensor)

    @property
    def resident_bytes(self) -> int:
        """Bytes the shared buffers hold."""
        return sum(b.storage.numel() * b.storage.element_size() for b in self._buffers.values())

    @property
    def per_capture_bytes(self) -> int:
        """Bytes that a copy per capture would have held."""
        return self._per_capture_bytes

    def _varying_dim(self, name: str, tensor: torch.Tensor, num_tokens: int, seq_dims: Mapping[str, int] | None) -> int:
        if seq_dims and name in seq_dims:
            return seq_dims[name] % tensor.dim()
        return next((i for i, size in enumerate(tensor.shape) if size == num_tokens), 0)

    def _get(self, config_idx: int, name: str, tensor: torch.Tensor, dim: int, longest: int) -> _Buffer:
        key = (config_idx, name)
        buffer = self._buffers.get(key)
        if buffer is None:
            trailing = tuple(tensor.shape[:dim] + tensor.shape[dim + 1 :])
            storage = torch.zeros((longest, *trailing), dtype=tensor.dtype, device=tensor.device)
            buffer = self._buffers[key] = _Buffer(storage, dim, trailing)
        return buffer

    def _view(self, buffer: _Buffer, tensor: torch.Tensor) -> torch.Tensor:
        shape, dim = tensor.shape, buffer.dim
        length = shape[dim] if dim < len(shape) else -1
        if length > buffer.storage.shape[0] or (*shape[:dim], *shape[dim + 1 :]) != buffer.trailing:
            raise RuntimeError(
                f"an input of shape {tuple(shape)} does not fit its static buffer of length {buffer.storage.shape[0]} "
                f"along dim {dim} and other dims {buffer.trailing}: captures must be largest-first "
                "with matching trailing dims"
            )
        head = buffer.storage[:length]
        return head if dim == 0 else head.movedim(0, dim)
