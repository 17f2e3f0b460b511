"""Loading of weights by name, with a refusal that names file and tensor for whatever is wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from mstar.kernels.cpu.panel_formats import BlockRows
from mstar.kernels.linear import takes_blocks
from mstar.model.checkpoint import Checkpoint
from mstar.model.dummy_source import DummySource
from mstar.model.gguf_source import GGUFSource
from mstar.model.safetensors_source import SafetensorsSource
from mstar.model.tensor_source import TensorSource
from mstar.utils.errors import LoadError

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_tensors(checkpoint: Checkpoint, device: torch.device = CPU, load_format: str = "auto") -> TensorSource:
    """The tensors of an opened checkpoint, on their way to ``device``.  LoadError as the sources.

    Args:
        load_format: dummy opens no weights and makes them up.
    """
    if load_format == "dummy":
        return DummySource(checkpoint)
    if checkpoint.gguf is not None:
        return GGUFSource(checkpoint.gguf, checkpoint.config, checkpoint.family)
    return SafetensorsSource(checkpoint.path, device)


def choose_dtype(asked: torch.dtype | None, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype weights are held and computed in; logs a line when it is not the stored one.

    Without a wish the CPU takes float32 (its 16-bit kernels are slower) and other devices the stored 16-bit dtype,
    or bfloat16.  ``stored`` is None for quantised weights.

    Raises:
        LoadError: the wish is none of float32, bfloat16, float16.
    """
    if asked is not None and asked not in SERVED_DTYPES:
        raise LoadError(f"dtype must be float32, bfloat16 or float16, got {str(asked).removeprefix('torch.')}")
    if asked is None:
        wide = device.type == "cpu"
        asked = torch.float32 if wide else stored if stored in SERVED_DTYPES[1:] else torch.bfloat16
    if stored is not None and asked != stored:
        risk = "; values past 65504 overflow" if asked == torch.float16 else ""
        logger.warning("weights are stored as %s and served as %s%s", stored, asked, risk)
    return asked


class WeightReader:
    """Hands out a source's tensors in one dtype on one device, and remembers which were taken.

    ``num_parameters`` and ``num_bytes`` count what was handed out.  ``keeps_blocks`` hands quantised matrices of
    linear layers out as they are stored, where ``PackedLinear`` can compute from them.
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, keeps_blocks: bool = True
    ) -> None:
        self.source, self.dtype, self.device, self.keeps_blocks = source, dtype, device, keeps_blocks
        self.num_parameters = 0
        self.num_bytes = 0
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.source.entries

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor.  LoadError naming file and tensor if it is missing or of another shape."""
        return self.read_stacked([(name, shape)])

    def read_stacked(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Tensors that share all but their first dimension, in one: each is copied once, into its place.

        Args:
            parts: (name, expected shape) in order.

        Raises:
            LoadError: one is missing or of another shape; names the file, the tensor and both shapes.
        """
        for name, shape in parts:
            self._check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        at = 0
        for name, shape in parts:
            self.source.read_into(name, out[at : at + shape[0]])
            self._taken.add(name)
            at += shape[0]
        self.num_parameters += out.numel()
        self.num_bytes += out.nbytes
        return out

    def read_linear(self, parts: Sequence[tuple[str, tuple[int, int]]]) -> torch.Tensor | BlockRows:
        """As :meth:`read_stacked`, for a weight of :class:`PackedLinear`: in blocks if all parts share their kind."""
        kinds = {entry.block_kind for name, _ in parts if (entry := self.source.entries.get(name))}
        kind = kinds.pop() if len(kinds) == 1 else None
        if not self.keeps_blocks or kind is None or not takes_blocks(kind, self.dtype, self.device):
            return self.read_stacked(parts)
        for name, shape in parts:
            self._check(name, shape)
        tensors = [self.source.read_blocks(name) for name, _ in parts]
        data = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        self._taken.update(name for name, _ in parts)
        self.num_parameters += sum(rows * width for _, (rows, width) in parts)
        self.num_bytes += data.nbytes
        return BlockRows(data, kind)

    def finish(self) -> None:
        """Closes the source.  LoadError naming a tensor that no part of the model has asked for."""
        unknown = sorted(set(self.source.entries) - self._taken - self.source.ignored)
        if unknown:
            entry = self.source.entries[unknown[0]]
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise LoadError(f"{entry.file}: tensor {entry.stored_as} is not known to this architecture{more}")
        self.source.close()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.source.entries.get(name)
        if entry is None:
            raise LoadError(f"{self.source.place_of(name)} is missing")
        if entry.shape != shape:
            raise LoadError(
                f"{entry.file}: tensor {entry.stored_as} has shape {list(entry.shape)}, expected {list(shape)}"
            )
