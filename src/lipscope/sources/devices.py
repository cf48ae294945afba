"""Names of devices, read without torch."""

from __future__ import annotations

import importlib.metadata

from lipscope.errors import InputError

# How a refusal goes on where PyTorch, of some version, was built without GPUs.
CPU_ALONE = (
    ", and PyTorch {}, which is built for the CPU alone. Install a build for GPUs, as "
    "pytorch.org/get-started says, or leave `device` out."
)
_KINDS = ("auto", "cpu", "cuda", "hip", "hpu", "maia", "meta", "mps", "mtia", "xla", "xpu")


def check_device(name: str) -> None:
    """Refuse what is no device, and a GPU where PyTorch was built without.

    >>> check_device("cuba")
    Traceback (most recent call last):
    lipscope.errors.InputError: `device` should be one of this machine. Found `cuba`; name auto, \
cpu, cuda or another kind of PyTorch's.
    """
    kind, why = name.partition(":")[0], ""
    version = importlib.metadata.version("torch")
    if kind not in _KINDS:
        why = "; name auto, cpu, cuda or another kind of PyTorch's."
    elif kind == "cuda" and version.endswith("+cpu"):
        why = CPU_ALONE.format(version)
    if why:
        raise InputError(f"`device` should be one of this machine. Found `{name}`{why}")
