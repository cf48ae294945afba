"""Lipschitz bounds derived here."""
