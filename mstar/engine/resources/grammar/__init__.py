"""Grammars: what a guide allows, compiled once, and a matcher by master row that bars all other tokens."""
