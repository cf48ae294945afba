"""Newhouse et al. (2025), "Training Transformers with Enforced Lipschitz Constants"."""
