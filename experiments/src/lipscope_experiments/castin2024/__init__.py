"""Castin, Ablin and Peyré (2024), "How Smooth Is Attention?": its figures and open points."""
