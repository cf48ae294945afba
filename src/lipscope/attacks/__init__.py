"""Inputs that make sigma large, built and found."""
