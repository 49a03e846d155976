"""What is raised of pages: where there is no room, or one is not the row's."""


class OutOfPagesError(RuntimeError):
    """A lack of free pages; nothing was taken."""


class OutOfStatesError(OutOfPagesError):
    """A lack of free entries for states of rows; nothing was taken."""


class WrongPageError(RuntimeError):
    """A row has read a page that is not its own: its tokens are wrong from there on."""
