"""Inputs of models: windows of text, pictures, batches, controls."""
