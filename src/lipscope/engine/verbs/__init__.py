"""The verbs: what can be asked of a layer at its input, or of a plan of them."""
