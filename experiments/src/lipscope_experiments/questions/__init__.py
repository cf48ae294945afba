"""Questions that people ask of their own models."""
