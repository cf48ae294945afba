"""Layers on weighted tokens."""
