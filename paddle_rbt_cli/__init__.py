"""The command line ``paddle-rbt``: names, arguments and help of its commands.

This is a separate package because importing ``paddle_rbt_plugin`` imports Paddle, which takes seconds and is not needed for
help, completion and usage errors. Each command imports the module that it calls when it runs.
"""

from paddle_rbt_cli.commands import cli, main

__all__ = ["cli", "main"]
