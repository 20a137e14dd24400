"""What the `kvjax` program can do, a module a command."""
