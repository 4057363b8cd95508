"""``python -m paddle_rbt_plugin``: the command line."""

from paddle_rbt_plugin.cli.main import main

if __name__ == "__main__":
    main()
