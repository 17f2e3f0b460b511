"""Lies here so that tests in the folders below can import this folder's helpers."""
