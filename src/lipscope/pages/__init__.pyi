# The front door: what other rooms may use.
from .figures import push_charts
from .pushed import Push, pushes_in
from .reference import SCOPES, catalogue_page, families_page, source_page, variants_page
from .rows import Rows, report
from .table import empty_table, number

__all__ = [
    "SCOPES",
    "Push",
    "Rows",
    "catalogue_page",
    "empty_table",
    "families_page",
    "number",
    "push_charts",
    "pushes_in",
    "report",
    "source_page",
    "variants_page",
]
