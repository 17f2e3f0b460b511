"""Kernels for CPUs, written in LLVM IR and compiled at load."""
