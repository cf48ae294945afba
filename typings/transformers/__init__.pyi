# For pyright: transformers names its models by hundreds of wildcard imports, which take a quarter
# of the time of all checks to follow, and most of what they lead to has no types.
from typing import Any

def __getattr__(name: str) -> Any: ...
