"""What lies in Triton's cache of our kernels, and what each takes of a multiprocessor."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OURS = b"mstar/kernels/cuda/"  # in the path of a kernel's source
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


class CachedKernel(NamedTuple):
    """``key`` is its hash, ``arch`` its compute capability (90 is 9.0).  ``registers`` per thread and ``spilled_bytes``
    are None where NVIDIA's cuobjdump is not at hand."""

    name: str
    key: str
    arch: int
    num_warps: int
    num_stages: int
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None


def cache_folder() -> Path:
    """Triton's cache: TRITON_CACHE_DIR, else ``.triton/cache`` in TRITON_HOME or the home folder."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def cached_kernels(folder: Path) -> list[CachedKernel]:
    """Our kernels in a cache, by name."""
    return sorted(_read(file) for file in folder.glob("*/*.json") if _is_ours(file))


def _is_ours(file: Path) -> bool:
    source = file.with_suffix(".source")
    return not file.name.startswith("__grp__") and source.is_file() and OURS in source.read_bytes()


def _read(file: Path) -> CachedKernel:
    meta = json.loads(file.read_text())
    return CachedKernel(
        meta["name"],
        meta["hash"],
        int(meta["target"]["arch"]),
        meta["num_warps"],
        meta["num_stages"],
        meta["shared"],
        *_usage(file.with_suffix(".cubin")),
    )


def _usage(cubin: Path) -> tuple[int | None, int | None]:
    package = find_spec("triton")
    tool = Path(package.origin).parent / "backends/nvidia/bin/cuobjdump" if package and package.origin else Path()
    if not tool.is_file() or not cubin.is_file():
        return None, None
    told = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
    found = _USAGE.search(told)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (None, None)
