"""Causal attention over the paged cache."""
