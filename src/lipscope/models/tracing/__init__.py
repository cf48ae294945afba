"""From a model's forward pass to the maps of its layers."""
