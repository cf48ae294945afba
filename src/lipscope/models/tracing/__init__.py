"""Traces of a model's forward pass, and the maps of its layers."""
