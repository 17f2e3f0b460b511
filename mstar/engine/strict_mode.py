"""What a real graph would freeze, caught on the CPU: host reads in a captured forward, and replays that differ.

A dispatch mode sees every operator; a torch-function mode sees the reads that never reach the dispatcher
(``.tolist()``, ``.cpu()``, ``.numpy()`` on a CPU tensor).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operator name, then (dtype, shape) of every tensor it returned.
OpRecord = tuple[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _active.get() is None:
            return func(*args, **(kwargs or {}))
        if _reads_on_host(func, args, kwargs or {}):
            raise StrictModeError(f"a captured forward reads a tensor on the host: {func.name()}")
        result = func(*args, **(kwargs or {}))
        self.trace.append((func.name(), tuple((t.dtype, tuple(t.shape)) for t in _tensors(result))))
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
    the real head only); multiples of it scale likewise, every other size must be equal.

    Raises:
        StrictModeError: names the first operator, dtype or shape that differs.
    """
    for i, (was, now) in enumerate(zip(captured, replayed, strict=False)):
        if was[0] != now[0]:
            raise StrictModeError(f"operator {i}: captured {was[0]}, replayed {now[0]}")
        if [t[0] for t in was[1]] != [t[0] for t in now[1]]:
            raise StrictModeError(f"operator {i} ({was[0]}): captured {was[1]}, replayed {now[1]}")
        for (_, before), (_, after) in zip(was[1], now[1], strict=True):
            if not _same_shape(before, after, varying):
                raise StrictModeError(f"operator {i} ({was[0]}): captured shape {before}, replayed {after}")
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
    recorder.trace.append((f"opaque::{name}", ()))
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def _same_shape(before: tuple[int, ...], after: tuple[int, ...], varying: Collection[tuple[int, int]]) -> bool:
    if before == after:
        return True
    if not varying or len(before) != len(after):
        return False
    return all(
        b == a or any(b % was == 0 and a == b // was * now for was, now in varying if was)
        for b, a in zip(before, after, strict=True)
    )


def _reads_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator's result, or the result's shape, needs tensor values on the host."""
    name = func.name()
    if name == "aten::index.Tensor":  # of dynamic shape only where an index is a mask
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name.startswith("aten::repeat_interleave"):
        return kwargs.get("output_size") is None and name != "aten::repeat_interleave.self_int"
    return name in _HOST_READ_OPS or not _HOST_READ_TAGS.isdisjoint(func.tags)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
