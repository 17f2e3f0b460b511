"""Tensors of a folder's safetensors files, single or sharded by an index."""

from __future__ import annotations

import json
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mstar.model.hf_folder import read_json
from mstar.model.tensor_source import TensorEntry, TensorSource
from mstar.utils.errors import LoadError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # written by old exporters


class SafetensorsSource(TensorSource):
    """Reads through the ``safetensors`` library's memory map, straight to ``device``: dtypes are converted there.

    Raises:
        LoadError: no weights, a missing shard, a file that is malformed or cut short, or a quantised tensor; names
            the file and the tensor.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self._device = str(device)
        self.entries = {}
        self._files: dict[Path, Any] = {}
        self._shard_of: dict[str, str] = {}
        index = read_json(folder / INDEX)
        if index is not None:
            self._shard_of = _weight_map(index, folder / INDEX)
        elif not (folder / SINGLE).is_file():
            raise LoadError(f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors weights are read")
        for shard in sorted(set(self._shard_of.values())) or [SINGLE]:
            self._open(folder / shard)
        self.ignored = frozenset(name for name in self.entries if ROTARY_BUFFER.fullmatch(name))

    def _open(self, path: Path) -> None:
        if not path.is_file():
            missing = next(name for name, shard in self._shard_of.items() if shard == path.name)
            raise LoadError(f"{path}: the shard is missing; {INDEX} puts tensor {missing} there")
        try:
            file = safe_open(str(path), framework="pt", device=self._device)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path}: {_what_is_wrong(path) or f'cannot be read: {error}'}") from None
        self._files[path] = file
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            kind = part.get_dtype()
            if kind not in DTYPES:
                raise LoadError(f"{path}: tensor {name} is stored as {kind}; quantised weights are not supported")
            self.entries[name] = TensorEntry(tuple(part.get_shape()), path, name, DTYPES[kind])

    def read_into(self, name: str, out: torch.Tensor) -> None:
        entry = self.entries[name]
        out.copy_(self._files[entry.file].get_tensor(name))

    def place_of(self, name: str) -> str:
        return f"{self.folder / self._shard_of.get(name, INDEX if self._shard_of else SINGLE)}: tensor {name}"

    def close(self) -> None:
        self._files.clear()


def _weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(v, str) for v in shards.values()):
        raise LoadError(f"{path}: weight_map must map tensor names to files")
    for name, shard in shards.items():
        if Path(shard).name != shard:
            raise LoadError(f"{path}: tensor {name} is in {shard!r}, which is no plain file name")
    return shards


def _what_is_wrong(path: Path) -> str | None:
    """Names the first tensor that the file is too short for, where its header can still be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            return f"is cut short inside its header ({size} bytes)"
        try:
            header = json.loads(file.read(length))
            ends = {name: 8 + length + info["data_offsets"][1] for name, info in header.items() if "shape" in info}
            empty = [name for name, info in header.items() if "shape" in info and not prod(info["shape"])]
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size and name not in empty:
            return f"tensor {name} is cut short: it ends at byte {end}, the file at {size}"
    return None
