"""Inputs on which attention is far from smooth, each built from one head's ``A`` and ``V``.

One kind of input is one function that returns a `Construction`.
"""
