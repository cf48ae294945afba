# The front door: what other rooms may use.
from .figures import push_charts
from .pushed import Push, pushes_in
from .rows import Rows, report
from .table import empty_table, number

__all__ = ["Push", "Rows", "empty_table", "number", "push_charts", "pushes_in", "report"]
