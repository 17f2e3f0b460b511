"""A GPU on paper: tensors that have shapes and no memory say they lie on it, and torch's orders to it do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # it looks at torch.cuda as it is imported, which must be before anything there is replaced
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # by compute capability
MEMORY_BYTES = 1 << 37


@contextlib.contextmanager
def gpu_on_paper(capability: int) -> Iterator[None]:
    """Code runs as on one GPU of compute capability ``capability`` (90 is 9.0), as long as it reads nothing back."""
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS.get(capability, 132))
    calls = {
        "Event": _Nothing,
        "Stream": _Nothing,
        "stream": _Nothing,
        "current_stream": _Nothing,
        "set_device": _Nothing,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
    }
    with replaced(torch.cuda, **calls), _OnPaper():
        yield


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or class, by name, stand for others meanwhile."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class _Nothing:
    """A stream or an event of no device: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


_ANSWERS = {
    torch.Tensor.device.__get__: DEVICE,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}


class _OnPaper(TorchFunctionMode):
    """Puts what should go to a GPU on torch's device ``meta``, and has it say otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func]
        moved = {name: _moved(value) for name, value in kwargs.items() if name != "pin_memory"}
        return func(*map(_moved, args), **moved)


def _moved(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("meta") if is_device and torch.device(value).type == "cuda" else value
