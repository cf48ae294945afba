# The front door: what other rooms may use.
from .bounds_table import empty_table
from .files import push_charts
from .pushed import Push, pushes_in
from .report_page import report
from .rows import Rows
from .table import number

__all__ = [
    "Push",
    "Rows",
    "empty_table",
    "number",
    "push_charts",
    "pushes_in",
    "report",
]
