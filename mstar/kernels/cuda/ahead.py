"""Compiling kernels without a GPU, into the cache where a process with one finds them.

Inside :func:`compiling_ahead` every launch of a kernel compiles it and does nothing else.  It goes through Triton's own
launch path, so that the key in the cache comes out as it does on the device: that takes the same installation of
Triton, the same sources and environment, and arguments of the same dtypes, alignment and divisibility.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime import build as triton_build
from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mstar.kernels.cuda import pdl
from mstar.kernels.cuda.paper import gpu_on_paper, replaced
from mstar.kernels.cuda.streams import has_streams
from mstar.utils.errors import MstarError

WARP_SIZE = 32
_SET_BY_UTILS = ("PyCUtensorMap", "PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")  # in the driver's module


class CompiledKernel(NamedTuple):
    """``key`` is its hash in the cache, ``was_cached`` whether it was there already."""

    name: str
    key: str
    was_cached: bool


@contextlib.contextmanager
def compiling_ahead(capability: int) -> Iterator[list[CompiledKernel]]:
    """Launches compile for compute capability ``capability`` (90 is 9.0); yields the list that they are added to.

    Also builds what launches them from the host, where there is a C compiler.

    Raises:
        MstarError: kernels were imported under TRITON_INTERPRET, which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise MstarError("TRITON_INTERPRET is set: nothing can be compiled")
    compiled: list[CompiledKernel] = []
    known: set[str] = set()
    memories: dict[Any, Any] = {}  # of kernels, what they know of the device that is there
    hits: list[bool] = []
    launchers = _Launchers()
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self not in memories:
            memories[self], self.device_caches = self.device_caches, defaultdict(self.create_binder)
        named = {name: _pointer(value) for name, value in kwargs.items()}
        kernel = run(self, *map(_pointer, args), grid=grid, warmup=True, **named)
        if kernel.hash not in known:
            known.add(kernel.hash)
            compiled.append(CompiledKernel(kernel.name, kernel.hash, hits[-1]))
            launchers.build(kernel)
        return kernel

    before = driver._active
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, WARP_SIZE)))
    _forget_devices()
    try:
        with (
            launchers,
            replaced(JITFunction, run=compile_instead),
            replaced(triton.knobs.compilation, listener=lambda *, cache_hit, **_: hits.append(cache_hit)),
            gpu_on_paper(capability),
        ):
            yield compiled
    finally:
        driver._active = before
        for kernel, memory in memories.items():
            kernel.device_caches = memory
        _forget_devices()


@contextlib.contextmanager
def standing_in_for(triton_key: str | None) -> Iterator[None]:
    """Kernels go to the places in the cache where another installation of Triton looks, whose ``triton_key()`` this is.

    None is this installation.

    Raises:
        MstarError: it is of another version.
    """
    if triton_key is None:
        yield
        return
    if not triton_key.startswith(triton.__version__):
        raise MstarError(f"the other Triton is {triton_key[:8]!r}..., this one {triton.__version__}")
    with replaced(triton_cache, triton_key=lambda: triton_key):
        yield


def _forget_devices() -> None:
    pdl.has_pdl.cache_clear()
    has_streams.cache_clear()


class _NoDevice:
    """What Triton asks of a driver until it has compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Pointer:
    """A tensor as a kernel's argument: its dtype, and an address that is aligned as the tensor is in its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


def _pointer(value: Any) -> Any:
    return _Pointer(value) if isinstance(value, torch.Tensor) else value


def _driver_functions() -> list[str]:
    """What of libcuda the launchers call.  One that found none of it there would be linked without libcuda."""
    folder = Path(nvidia_driver.dirname)
    text = "".join((folder / name).read_text() for name in ("driver.c", "driver.py"))
    return sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))


class _Unloaded:
    """A C module that was built and cannot be loaded here: it has any attribute, and each is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Launchers:
    """Builds the C modules by which Triton launches kernels, against a libcuda that is none, and loads none of them:
    one for all kernels, before Triton 3.7 also one for each.  From 3.8 on the former's place in the cache depends on
    the folder of libcuda, so that a machine with a GPU makes its own, in a second."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._can_build = shutil.which("cc") is not None

    def __enter__(self) -> None:
        if not self._can_build:
            return
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        source, library = folder / "cuda.c", folder / "libcuda.so.1"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in _driver_functions()))
        subprocess.run(["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        dirs = [nvidia_driver.libdevice_dir, str(folder)]
        self._stack.enter_context(replaced(triton_build, _load_module_from_path=lambda *_: _Unloaded()))
        self._stack.enter_context(replaced(nvidia_driver, library_dirs=lambda: dirs))
        with replaced(nvidia_driver, **{name: None for name in _SET_BY_UTILS if hasattr(nvidia_driver, name)}):
            object.__new__(nvidia_driver.CudaUtils).__init__()

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def build(self, kernel: Any) -> None:
        if self._can_build and hasattr(nvidia_driver, "make_launcher"):
            nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)
