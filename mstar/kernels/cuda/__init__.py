"""Triton-language kernels for NVIDIA GPUs, each beside its torch reference.  Imported only where one is launched."""
