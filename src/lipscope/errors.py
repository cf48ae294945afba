"""The one exception for a mistake that its user can mend.

Every public door raises it with one line that says what, where and what to do; the
command line prints that line and exits with status 2.
"""


class InputError(ValueError):
    """A request that cannot be answered as asked; the message says what to change."""
