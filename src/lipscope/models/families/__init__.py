"""Layers read in closed form: one architecture, one file."""
