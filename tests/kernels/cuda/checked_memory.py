"""What Triton's interpreter lets pass and a GPU doesn't: addresses outside of a launch's tensors, and threads of one
program that don't wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class CheckedMemory:
    """Checks each load, store and atomic of interpreted kernels, which raise what it finds.

    A scalar is loaded by every thread and stored by one.  So between the load and the store of one address there has
    to be a barrier, or some threads find what was stored; a sum or the like is none, as it may stay within a warp.

    Where a kernel makes a pointer of a number, what lies there is no tensor of the launch: its addresses then pass.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._begins = self._ends = np.zeros(0, np.uint64)
        self._is_bound = True  # to the launch's tensors
        self._has_threads = False  # that may be ahead of others
        self._loaded: set[int] = set()
        self._stored: set[int] = set()
        for name, check in {
            "create_masked_load": lambda ptrs, mask, *_, **__: self._load(ptrs, mask),
            "create_masked_store": lambda ptrs, _, mask, *__, **___: self._store(ptrs, mask),
            "create_atomic_rmw": lambda _, ptrs, __, mask, *___: self._atomic(ptrs, mask),
            "create_int_to_ptr": lambda *_: self._unbind(),
            "create_barrier": self._wait,
            "set_grid_idx": lambda *_: self._wait(),
        }.items():
            patch.setattr(InterpreterBuilder, name, _preceded(getattr(InterpreterBuilder, name), check))
        init, call = GridExecutor._init_args_hst, GridExecutor.__call__

        def init_checked(executor: Any, args: Any, kwargs: Any) -> Any:
            on_host = init(executor, args, kwargs)
            ranges = sorted(set(_ranges((*on_host[0], *on_host[1].values()))))
            self._begins, self._ends = (np.array([r[i] for r in ranges], np.uint64) for i in range(2))
            return on_host

        def call_checked(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._is_bound, self._has_threads = True, kwargs.get("num_warps", 4) > 1
            call(executor, *args, **kwargs)

        patch.setattr(GridExecutor, "_init_args_hst", init_checked)
        patch.setattr(GridExecutor, "__call__", call_checked)

    def _load(self, ptrs: Any, mask: Any) -> None:
        if (address := self._scalar(ptrs, mask)) is not None:
            assert address not in self._stored, "loaded with no barrier after the store"
            self._loaded.add(address)

    def _store(self, ptrs: Any, mask: Any) -> None:
        if (address := self._scalar(ptrs, mask)) is not None:
            assert address not in self._loaded, "stored with no barrier after the load"
            self._stored.add(address)

    def _atomic(self, ptrs: Any, mask: Any) -> None:
        if self._scalar(ptrs, mask) is not None:
            self._wait()  # for the one thread that does it

    def _unbind(self) -> None:
        self._is_bound = False

    def _wait(self) -> None:
        self._loaded.clear()
        self._stored.clear()

    def _scalar(self, ptrs: Any, mask: Any) -> int | None:
        """The address, if it is one that threads share; checks all where there are several."""
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        if ptrs.data.size == 1:
            address = int(ptrs.data.flat[0])
            if not mask.data.all():
                return None
            self._check(address, address + size)
            return address if self._has_threads else None
        addresses = ptrs.data[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)]
        if addresses.size:
            self._check(int(addresses.min()), int(addresses.max()) + size, addresses, size)
        return None

    def _check(self, begin: int, end: int, addresses: np.ndarray | None = None, size: int = 0) -> None:
        if not self._is_bound or ((self._begins <= begin) & (end <= self._ends)).any():
            return
        assert addresses is not None, "an address outside of the launch's tensors"
        for address in addresses.tolist():  # of several tensors
            self._check(address, address + size)


def _preceded(method: Any, check: Any) -> Any:
    def checked(builder: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return method(builder, *args, **kwargs)

    return checked


def _ranges(args: Any) -> Iterator[tuple[int, int]]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _ranges(arg)
        elif isinstance(arg, torch.Tensor):
            storage = arg.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        elif hasattr(arg, "base"):  # a descriptor or a wrapper of a tensor
            yield from _ranges((arg.base,))
