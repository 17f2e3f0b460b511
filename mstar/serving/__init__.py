"""Triton Inference Server: tensor contract, responses, launcher (no torch)."""
