"""Theorems derived here."""
