# The front door: what other rooms may use.
from .content import window_shares as window_shares
from .figures import push_charts as push_charts
from .html_page import asset as asset, live_data as live_data, live_script as live_script
from .moves import (
    Push as Push,
    directions_in_words as directions_in_words,
    pushes_in as pushes_in,
)
from .reference import (
    SCOPES as SCOPES,
    catalogue_page as catalogue_page,
    families_page as families_page,
    source_page as source_page,
    variants_page as variants_page,
)
from .rows import Rows as Rows, report as report
from .table import empty_table as empty_table, interval as interval, number as number
