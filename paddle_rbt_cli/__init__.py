"""The command line ``paddle-rbt``: names, arguments and help of its commands.

It is a package of its own because importing ``paddle_rbt_plugin`` imports Paddle, which takes seconds: help, completion and
wrong usage need none of it. A command imports what it calls when it runs.
"""

from paddle_rbt_cli.commands import cli, main

__all__ = ["cli", "main"]
