"""Machine code for this CPU from LLVM IR, run on torch's own OpenMP threads.

A kernel is a module with a function `worker(ptr arguments)`, which every thread of a parallel region runs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TypeVar

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:
    llvm = ir = None

logger = logging.getLogger(__name__)
Kernel = TypeVar("Kernel")


class Worker:
    """A compiled `worker`.  The module may call `omp_get_thread_num` and `omp_get_num_threads`.

    Raises:
        OSError, AttributeError, RuntimeError: no OpenMP under GNU names in this process, or IR that this LLVM refuses.
    """

    def __init__(self, module: str) -> None:
        openmp = ctypes.CDLL(None)  # torch loads its OpenMP globally: its pool is shared, not doubled
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # Without the last feature, LLVM splits 512-bit vectors in two on the CPUs that it tunes for 256 bits.
        features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=3
        )
        parsed = llvm.parse_assembly(module)
        parsed.verify()
        self._engine = llvm.create_mcjit_compiler(parsed, machine)  # owns the machine code
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("worker")
        self._parallel = openmp.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def __call__(self, arguments: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        """Runs the worker on `threads` threads, the caller among them; returns when all have."""
        self._parallel(self._address, arguments, threads, 0)


def words(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """The arguments of a worker, 8 bytes each."""
    return (ctypes.c_int64 * len(values))(*values)


def vector_lanes() -> int:
    """fp32 lanes of a vector register: 16 with AVX-512, 8 with AVX2.

    Raises:
        OSError: neither, or no FMA.
    """
    features = llvm.get_host_cpu_features()
    if not (features.get("avx2") and features.get("fma")):
        raise OSError("a CPU with AVX2 and FMA is needed")
    return 16 if features.get("avx512f") else 8


def make_or_warn(what: str, make: Callable[[], Kernel]) -> Kernel | None:
    """`make()`; None, with a warning that `what` runs at torch's speed, where the kernel cannot be made."""
    if llvm is None:
        logger.warning("llvmlite is not installed: %s on the CPU runs at torch's speed, 2 to 3 times slower", what)
        return None
    try:
        return make()
    except (OSError, AttributeError, TypeError, RuntimeError) as error:  # no AVX2, OpenMP under another name, old LLVM
        logger.warning("no CPU kernel can be made, %s runs at torch's speed: %s", what, error)
        return None
