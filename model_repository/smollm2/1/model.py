"""SmolLM2-135M-Instruct behind Triton's Python backend; every setting is in ../config.pbtxt."""

from mstar.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
