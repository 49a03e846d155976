"""What is raised where there is no room."""


class OutOfPagesError(RuntimeError):
    """There are not enough free pages; nothing was taken."""


class OutOfStatesError(OutOfPagesError):
    """There are not enough free entries for states of rows; nothing was taken."""
