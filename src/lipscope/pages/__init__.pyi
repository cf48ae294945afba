# The front door: what other rooms may use.
from .figures import push_charts
from .live import (
    directions_in_words,
    live_data,
    live_script,
    live_section,
    live_style,
    token_shares,
    token_words,
)
from .pushed import Push, pushes_in
from .reference import SCOPES, catalogue_page, families_page, source_page, variants_page
from .rows import Rows, report
from .table import empty_table, number

__all__ = [
    "SCOPES",
    "Push",
    "Rows",
    "catalogue_page",
    "directions_in_words",
    "empty_table",
    "families_page",
    "live_data",
    "live_script",
    "live_section",
    "live_style",
    "number",
    "push_charts",
    "pushes_in",
    "report",
    "source_page",
    "token_shares",
    "token_words",
    "variants_page",
]
