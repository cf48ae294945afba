"""The one function that applies any restraint to the layers that `measure` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lipscope.control import after_step, parametrised, penalties  # noqa: F401  (enter themselves)
from lipscope.control.probe import Layers, Probe
from lipscope.control.restraint import Restraint, restraints
from lipscope.errors import InputError, shown


def restrain(
    model: nn.Module,
    data: Tensor | Mapping[str, Any],
    how: str,
    *,
    layers: Layers = "all",
    cap: float | None = None,
    modules: str | None = None,
    seed: int = 0,
) -> Restraint:
    """Keep attention layers smooth in training: one penalty or constraint, by its name.

    Penalties, each the mean over layers and entries of the batch of:

    - ``sigma``: sigma, solved anew each time
    - ``sigma-estimate``: a lower estimate of sigma, two products a call, warm start
    - ``row-gram``: the row-Gram certificate, never below sigma
    - ``softmax-spread``: the log of the largest ``g_1`` of a row [yudin2025]
    - ``softmax-spread-ratio``: the log of the largest ``g_1 / g_2``, its baseline form
    - ``weight-norms``: the mean spectral norm of the weight matrices

    Constraints:

    - ``spectral-norm``, at once: weight matrices ``W cap / ‖W‖``, cap 1 if None
    - ``spectral-gain``, at once: ``g W / ‖W‖`` with a learnt ``g``, at first ``‖W‖``
    - ``query-key-norm``, at once: RMSNorm with a learnt gain on queries and keys
    - ``spectral-cap``, after a step: singular values of weights above the cap
    - ``query-key-clip``, after a step: queries and keys of heads with a larger logit
    - ``sigma-cap``, after a step: output projections of layers with a larger sigma

    All are of the map ``attention`` at the layer's own input, which is held fixed: a penalty has
    gradients for the weights of its own layer alone.

    Holds for layers whose weights are read in closed form; constraints on weight matrices and
    ``weight-norms`` for all.

    Args:
        model: The model in training, or an `Attention` layer.
        data: A few sequences without padding: input ids, embeddings, pixels or a mapping of
            arguments. Layers are looked at there.
        how: Name of the restraint.
        layers: Indices from 0 as in the rows of `measure`, or "all".
        cap: Of a penalty: only what is above counts, all if None. Of a constraint: see above.
        modules: Regular expression for the attention modules, as for `measure`.
        seed: Of random starts; torch's own generators are left alone.

    Returns:
        What has `penalty`, to be added to the loss, and `step`, to be called after a step of the
        optimiser.

    Raises:
        InputError: If there is no such restraint or layer, or it cannot act on this layer.

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> weights = [torch.nn.Parameter(2 * torch.eye(3)) for _ in range(3)]
    >>> layer, x = DotProduct(*weights), torch.zeros(4, 3)  # sigma = 2, the norm of the values
    >>> round(restrain(layer, x, "sigma").penalty().item(), 3)
    2.0
    >>> capped = restrain(layer, x, "sigma-cap", cap=1.0)
    >>> {i: round(factor, 2) for i, factor in capped.step().items()}
    {0: 0.5}
    """
    kind = restraints().get(how) if isinstance(how, str) else None
    if kind is None:
        raise InputError(f"`how` should be one of {', '.join(restraints())}. Found `{shown(how)}`.")
    probe = Probe(model, data, layers=layers, modules=modules)
    return kind(probe, cap=cap, seed=seed)
