"""The page in a frame of a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass

from lipscope.engine import OpenModel
from lipscope.explore.server import Server, served
from lipscope.explore.solver import twin

_HEIGHT = 780  # pixels


@dataclass(frozen=True)
class Explored:
    """A page on an open model, which a notebook shows in a frame.

    Attributes:
        address: Where it is; a browser on this machine opens it as well.
    """

    address: str
    server: Server

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="lipscope explore" src="{html.escape(self.address)}" '
            f'style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Explored at {self.address}: a notebook shows it; `.end()` ends it>"

    def end(self) -> None:
        """End the page."""
        self.server.end()


def explore(model: OpenModel, text: str | None = None) -> Explored:
    """The live page on an open model, as a notebook shows it.

    The page asks a module of its own, of the same weights, so that both may be asked at once.
    """
    server = served([twin(model)], text, framed=True)
    server.start()
    return Explored(server.address, server)
