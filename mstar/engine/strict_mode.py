"""What a real graph would freeze, caught on the CPU: host reads in a captured forward, and replays that differ.

A dispatch mode sees every operator; a torch-function mode sees the reads that never reach the dispatcher
(``.tolist()``, ``.cpu()``, ``.numpy()`` on a CPU tensor).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class OpRecord(NamedTuple):
    """One operator of a forward: what it returned, and what of its arguments a graph would have frozen.

    ``addresses`` of the tensors it reads that the forward did not make itself: weights, static buffers.
    ``constants``: its Python arguments, sizes and counts included.
    """

    name: str
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    addresses: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()


_HOST_READS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "equal",
    }
)
# Composite operators reach the dispatcher whole in inference mode, and carry no tag.
_HOST_READ_OPS = frozenset({"aten::item", "aten::is_nonzero", "aten::where", "aten::argwhere", "aten::nonzero_numpy"})
_HOST_WRITE_OPS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})  # torch.tensor(value)
_HOST_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_active: ContextVar[_OpRecorder | None] = ContextVar("active", default=None)


class StrictModeError(RuntimeError):
    """A captured forward did what a real graph could not replay."""


class _HostReadGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and _active.get() is not None:
            raise StrictModeError(f"a captured forward reads a tensor on the host: {name}")
        return func(*args, **(kwargs or {}))


class _OpRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace: list[OpRecord] = []
        self._made: set[int] = set()  # storages that the forward allocated; what it reads else lay there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_recorded = _active.get() is not None
        if is_recorded:
            _check_host_free(func, args, kwargs)
        result = func(*args, **kwargs)
        read, results = list(_tensors((args, kwargs))), list(_tensors(result))
        outside = {_storage(t): t.data_ptr() for t in read if _storage(t) not in self._made}
        self._made.update(_storage(t) for t in results if _storage(t) not in outside)
        if is_recorded:
            shapes = tuple((t.dtype, tuple(t.shape)) for t in results)
            constants = tuple(_constants((args, kwargs)))
            self.trace.append(OpRecord(func.name(), shapes, tuple(outside.values()), constants))
        return result


def record(fn: Callable[[], Any]) -> tuple[Any, list[OpRecord]]:
    """Runs ``fn`` under both modes; returns its result and the operators it called, in order.

    Raises:
        StrictModeError: it read a tensor's value on the host.
    """
    recorder = _OpRecorder()
    with _HostReadGuard(), recorder:
        token = _active.set(recorder)
        try:
            return fn(), recorder.trace
        finally:
            _active.reset(token)


def compare(captured: list[OpRecord], replayed: list[OpRecord], varying: Collection[tuple[int, int]] = ()) -> None:
    """Refuses a replay whose operators are not those of its capture.

    ``varying``: pairs of a size at capture and in this replay (tokens and rows of a packed bucket that runs over
    the real head only); multiples of it scale likewise, every other size must be equal, and integer arguments are
    not compared.

    Raises:
        StrictModeError: names the first operator, dtype, shape, constant or address that differs.
    """
    for i, (was, now) in enumerate(zip(captured, replayed, strict=False)):
        if was.name != now.name:
            raise StrictModeError(f"operator {i}: captured {was.name}, replayed {now.name}")
        if [t[0] for t in was.results] != [t[0] for t in now.results]:
            raise StrictModeError(f"operator {i} ({was.name}): captured {was.results}, replayed {now.results}")
        for (_, before), (_, after) in zip(was.results, now.results, strict=True):
            if not _same_shape(before, after, varying):
                raise StrictModeError(f"operator {i} ({was.name}): captured shape {before}, replayed {after}")
        if _fixed(was.constants, varying) != _fixed(now.constants, varying):
            raise StrictModeError(
                f"operator {i} ({was.name}): captured with {was.constants}, replayed with {now.constants}"
            )
        if was.addresses != now.addresses:
            raise StrictModeError(f"operator {i} ({was.name}): reads a tensor that is not where the capture read it")
    if len(captured) != len(replayed):
        raise StrictModeError(f"captured {len(captured)} operators, replayed {len(replayed)}")


@contextlib.contextmanager
def opaque(name: str) -> Iterator[None]:
    """Marks a resource's own code inside a forward, whose operators follow the step's plan.

    Real graphs hold one planned kernel there.  Inside, host reads are allowed and the trace shows one entry.
    """
    recorder = _active.get()
    if recorder is None:
        yield
        return
    recorder.trace.append(OpRecord(f"opaque::{name}"))
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def no_recompilation() -> contextlib.AbstractContextManager[None]:
    """Within it, what torch.compile would compile anew raises: a capture must find its code compiled.

    Costs nothing where nothing was compiled before.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def _fixed(constants: tuple[Any, ...], varying: Collection[tuple[int, int]]) -> list[Any]:
    """The constants that must not differ, as pairs with their type, since 1 == True == 1.0."""
    return [(type(c), c) for c in constants if not (varying and type(c) is int)]


def _same_shape(before: tuple[int, ...], after: tuple[int, ...], varying: Collection[tuple[int, int]]) -> bool:
    if before == after:
        return True
    if not varying or len(before) != len(after):
        return False
    return all(
        b == a or any(b % was == 0 and a == b // was * now for was, now in varying if was)
        for b, a in zip(before, after, strict=True)
    )


def _check_host_free(func: Any, args: Any, kwargs: Any) -> None:
    if _reads_on_host(func, args, kwargs):
        raise StrictModeError(f"a captured forward reads a tensor on the host: {func.name()}")
    if func.name() in _HOST_WRITE_OPS:
        raise StrictModeError(f"a captured forward makes a tensor from host values: {func.name()}")


def _reads_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator's result, or the result's shape, needs tensor values on the host."""
    name = func.name()
    if name == "aten::index.Tensor":  # of dynamic shape only where an index is a mask
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name.startswith("aten::repeat_interleave"):
        return kwargs.get("output_size") is None and name != "aten::repeat_interleave.self_int"
    return name in _HOST_READ_OPS or not _HOST_READ_TAGS.isdisjoint(func.tags)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _constants(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _constants(item)
    elif not isinstance(value, torch.Tensor):
        yield value
