"""mstar: an inference engine behind NVIDIA Triton Inference Server's Python backend."""

__version__ = "0.1.0"
