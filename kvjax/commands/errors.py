"""The error that ends a command with one line."""


class CommandError(Exception):
    """Something the user can repair; the message names the file, line or flag at fault."""
