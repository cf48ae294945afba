# The front door: what other rooms may use.
from .content import window_shares
from .directions import directions_in_words
from .figures import push_charts
from .html_page import asset, live_data, live_script
from .pushed import Push, pushes_in
from .reference import SCOPES, catalogue_page, families_page, source_page, variants_page
from .rows import Rows, report
from .table import empty_table, number

__all__ = [
    "SCOPES",
    "Push",
    "Rows",
    "asset",
    "catalogue_page",
    "directions_in_words",
    "empty_table",
    "families_page",
    "live_data",
    "live_script",
    "number",
    "push_charts",
    "pushes_in",
    "report",
    "source_page",
    "variants_page",
    "window_shares",
]
