"""Paged key/value cache."""
