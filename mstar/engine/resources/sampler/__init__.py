"""Sampling: what a request asks for, its state by master row, and one draw per row and step."""
