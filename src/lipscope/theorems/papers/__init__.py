"""Lipschitz bounds from the literature, one file per paper."""
