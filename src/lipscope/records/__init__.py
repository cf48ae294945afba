"""Rows, run folders, growth and sampling: what is known once tensors are gone."""
