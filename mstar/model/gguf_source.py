"""Tensors of a GGUF file, dequantised or in their quantised blocks."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mstar.model.config import ModelConfig
from mstar.model.families import Family
from mstar.model.gguf_config import IGNORED, gguf_name, hf_name
from mstar.model.gguf_file import GGUFFile
from mstar.model.tensor_source import TensorEntry, TensorSource
from mstar.utils.errors import LoadError

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
CHUNK = 1 << 19  # elements dequantised at a time: the intermediate arrays stay in the cache


class GGUFSource(TensorSource):
    """Reads one tensor at a time from the file, so that no more than one is held in its quantised form.

    Raises:
        LoadError: a quantisation that cannot be dequantised; names the file and the tensor.
    """

    ignored = IGNORED

    def __init__(self, file: GGUFFile, config: ModelConfig, family: Family) -> None:
        self.file = file
        self._by_name = {hf_name(tensor.name): tensor for tensor in file.tensors.values()}
        self._permuted_heads: dict[str, int] = {}
        if family.gguf_permutes_qk:
            self._permuted_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self.entries = {
            name: TensorEntry(tensor.shape, file.path, tensor.name, PLAIN.get(tensor.kind), _block_kind(tensor.kind))
            for name, tensor in self._by_name.items()
        }
        _check_kinds(file)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._by_name[name]
        raw = self._read_rows(name)
        rows = len(raw)
        if tensor.kind in PLAIN:
            out.view(rows, -1).copy_(torch.from_numpy(raw).view(PLAIN[tensor.kind]))
            return
        width = tensor.shape[-1]
        step = max(CHUNK // width, 1)
        for start in range(0, rows, step):
            chunk = raw[start : start + step]
            # As one long row: the library goes through its rows in groups of 16, which costs more than the arithmetic.
            values = dequantize(chunk.reshape(1, -1), tensor.kind).reshape(-1, width)
            out[start : start + step].copy_(torch.from_numpy(values))

    def read_blocks(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._read_rows(name))

    def _read_rows(self, name: str) -> np.ndarray:
        """uint8 [rows, bytes] as stored, in Hugging Face row order."""
        tensor = self._by_name[name]
        raw = np.fromfile(self.file.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if raw.size != tensor.num_bytes:
            raise LoadError(f"{self.file.path}: tensor {tensor.name} is cut short")
        raw = raw.reshape(tensor.shape[0], -1)
        parts = name.split(".")
        if (heads := self._permuted_heads.get(parts[-2] if len(parts) > 1 else "")) is not None:
            raw = unpermute_rows(raw, heads)
        return raw

    def place_of(self, name: str) -> str:
        return f"{self.file.path}: tensor {gguf_name(name)}"


def unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows [heads * head_dim, ...] from interleaved pairs (GGUF) back to two halves (Hugging Face)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _block_kind(kind: GGMLQuantizationType) -> str | None:
    return None if kind in PLAIN else kind.name


def _check_kinds(file: GGUFFile) -> None:
    usable: dict[GGMLQuantizationType, bool] = {}
    for tensor in file.tensors.values():
        if tensor.kind not in usable:
            usable[tensor.kind] = tensor.kind in PLAIN or _can_dequantize(tensor.kind)
        if not usable[tensor.kind] or (tensor.kind not in PLAIN and len(tensor.shape) != 2):
            raise LoadError(f"{file.path}: tensor {tensor.name} has the unsupported quantisation {tensor.kind.name}")


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
