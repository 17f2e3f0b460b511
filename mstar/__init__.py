"""mstar: an inference engine behind NVIDIA Triton Inference Server's Python backend."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar.llm import LLM
    from mstar.runtime.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``mstar.LLM`` and ``mstar.SamplingParams``, imported when asked for."""
    if name in __all__:
        from mstar import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
