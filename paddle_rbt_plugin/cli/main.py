"""The commands of ``paddle_rbt_cli``, for those who have imported this package, and with it Paddle, anyway."""

from paddle_rbt_cli import cli, main

__all__ = ["cli", "main"]
