"""Paged KV cache: the page arena, each row's stream, and the step's index arrays."""
