"""The verbs: questions about a layer at an input, or about a plan of layers and inputs."""
