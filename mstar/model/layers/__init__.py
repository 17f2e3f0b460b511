"""Layers that the text families share."""
