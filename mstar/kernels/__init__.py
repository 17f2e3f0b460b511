"""Kernels, each beside its torch reference."""
