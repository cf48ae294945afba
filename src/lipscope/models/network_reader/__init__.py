"""From a module to its `Network`: which parts follow which, found by values and proved.

A module runs once from the stream that enters its first block. What its norms, linear maps and
attention layers take and return there tells in what order they make its scores; sums are found
among the tensors that it forms. What is found is then held against the module itself.
"""
