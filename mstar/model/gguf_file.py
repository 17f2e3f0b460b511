"""Reader of GGUF headers: metadata and the table of tensors, every read checked against the file's size.

Our own because the reader of the ``gguf`` package takes seconds over a vocabulary (one array object per token).
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mstar.utils.errors import LoadError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file: ``shape`` is row-major (output rows first), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass
class GGUFFile:
    """Metadata (plain Python values, arrays as lists) and tensors of one file."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Reads the header.

        Raises:
            LoadError: no GGUF file, another version or byte order, a tensor of unknown quantisation, or a file that
                ends before its header or before one of its tensors; names the file and the tensor.
        """
        file = cls(path)
        try:
            with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
                _Header(file, view).read()
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}: cannot be read as a GGUF file: {error}") from None
        return file

    def read_floats(self, name: str) -> list[float]:
        """Values of a small F32 tensor; empty if it is stored in another form."""
        tensor = self.tensors[name]
        if tensor.kind != GGMLQuantizationType.F32:
            return []
        with self.path.open("rb") as handle:
            handle.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.num_bytes // 4}f", handle.read(tensor.num_bytes)))


class _Header:
    """A cursor over the mapped file."""

    def __init__(self, file: GGUFFile, view: mmap.mmap) -> None:
        self.file, self.view, self.at, self.size = file, view, 0, len(view)

    def read(self) -> None:
        path = self.file.path
        if self.view[:4] != b"GGUF":
            raise LoadError(f"{path}: is not a GGUF file (it begins with {self.view[:4]!r})")
        self.at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise LoadError(f"{path}: GGUF version {version} is not supported (2 or 3, little-endian)")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.file.metadata[key] = self._value(self._scalar("I"))
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.file.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise LoadError(f"{path}: general.alignment must be a positive integer, got {alignment!r}")
        data_start = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in headers:
            self._add_tensor(name, shape, kind, data_start + offset)

    def _take(self, num_bytes: int) -> int:
        start, self.at = self.at, self.at + num_bytes
        if self.at > self.size:
            raise LoadError(f"{self.file.path}: is cut short inside its header ({self.size} bytes)")
        return start

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.view, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        return self.view[start : start + length].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in SCALARS:
                layout = "<" + str(count) + SCALARS[item]
                return list(struct.unpack_from(layout, self.view, self._take(struct.calcsize(layout))))
            return self._strings(count) if item == STRING else [self._value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise LoadError(f"{self.file.path}: metadata of unknown type {kind}")
        return self._scalar(SCALARS[kind])

    def _strings(self, count: int) -> list[str]:
        """A list of strings in one loop: vocabularies have hundreds of thousands."""
        view, at, size, length_at = self.view, self.at, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        while len(out) < count and at + 8 <= size:
            start = at + 8
            at = start + length_at(view, at)[0]
            out.append(view[start:at].decode("utf-8", errors="replace"))
        if len(out) < count or at > size:
            self._take(size + 1)
        self.at = at
        return out

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > MAX_DIMS:
            raise LoadError(f"{self.file.path}: tensor {name} has {num_dims} dimensions")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        path = self.file.path
        try:
            quantisation = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantisation]
        except (ValueError, KeyError):
            raise LoadError(f"{path}: tensor {name} has the unknown quantisation {kind}") from None
        if shape and shape[-1] % block:
            raise LoadError(
                f"{path}: tensor {name} {list(shape)}: rows are no multiple of {block} ({quantisation.name})"
            )
        num_bytes = prod(shape) // block * block_bytes
        if offset + num_bytes > self.size:
            raise LoadError(
                f"{path}: tensor {name} is cut short: it ends at byte {offset + num_bytes}, the file at {self.size}"
            )
        self.file.tensors[name] = GGUFTensor(name, shape, quantisation, offset, num_bytes)
