"""The live page, which shows where attention is fragile as you type."""

from importlib.util import find_spec

from lipscope.errors import InputError, install

if not (find_spec("starlette") and find_spec("uvicorn")):
    raise InputError(
        f"The live page needs the extra `explore`; run `{install('explore')}` in the folder of "
        "lipscope."
    )

from lipscope.explore.server import Server as Server, explore as explore, served as served
