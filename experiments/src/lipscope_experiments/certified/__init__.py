"""Decisions of small classifiers: how far tokens may move, certified and attacked."""
