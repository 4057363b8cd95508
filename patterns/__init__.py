"""The built-in patterns. Each module is a plugin like any other, found through its entry point alone."""
