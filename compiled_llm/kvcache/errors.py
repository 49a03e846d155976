"""What is raised where there is no room for pages."""


class OutOfPagesError(RuntimeError):
    """A lack of free pages; nothing was taken."""


class OutOfStatesError(OutOfPagesError):
    """A lack of free entries for states of rows; nothing was taken."""
