"""Hook specifications, and the discovery, isolation, blocking and listing of plugins."""

from paddle_rbt_plugin.plugins.manager import BLOCK_VARIABLE, PluginRow, Plugins, PluginWarning, load_plugins
from paddle_rbt_plugin.plugins.markers import hookimpl, hookspec

__all__ = ["BLOCK_VARIABLE", "PluginRow", "PluginWarning", "Plugins", "hookimpl", "hookspec", "load_plugins"]
