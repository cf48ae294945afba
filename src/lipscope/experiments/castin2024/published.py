"""Quantities that published scripts compute under the name of sigma, for comparison only."""

from __future__ import annotations

import torch

from lipscope.models import LayerMap


def castin_scripts(layer: LayerMap) -> float:
    """``√‖J(X)^T f(X)‖_F``: where the power iteration of the published scripts ends.

    They take ``torch.func.jvp(f, (X,), (u,))[0]``, which is ``f(X)`` and not ``J u``, so that
    ``v = J^T f(X)`` in every round whatever ``u`` is, and return ``√<v / |v|, v>``. It has the
    unit of ``√(sigma ‖f(X)‖)`` and is at most that; it is not sigma.

    Holds for every map. For BERT the scripts take the map ``residual`` on text and ``heads``
    on adversarial inputs, for GPT-2 ``attention``.

    Args:
        layer: A map at its input.

    Returns:
        The quantity.

    Source: read in the code of [castin2024] (github.com/vcastin/how-smooth-is-attention,
    commit eff2f2a, ``loc_lipschitz``); ``examples/published_power_iteration.py`` repeats it.
    """
    with torch.no_grad():
        output = layer(layer.x)
        return float(layer.linearise(layer.x).rmatvec(output).norm().sqrt())
