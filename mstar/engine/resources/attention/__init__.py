"""Attention over the paged key/value cache."""
