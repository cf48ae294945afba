"""Theorems of the literature: one paper, one file."""
