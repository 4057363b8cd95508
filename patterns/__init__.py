"""The built-in patterns. Each module is a plugin found through its entry point, and uses nothing that a third-party package could not use."""
