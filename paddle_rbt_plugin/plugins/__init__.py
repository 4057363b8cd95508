"""Hook specifications, and the discovery, isolation, blocking and listing of plugins."""

from paddle_rbt_plugin.plugins.clusters import detect_cluster, parse_cluster
from paddle_rbt_plugin.plugins.kinds import Kind
from paddle_rbt_plugin.plugins.manager import BLOCK_VARIABLE, PluginRow, Plugins, PluginWarning, load_plugins
from paddle_rbt_plugin.plugins.markers import hookimpl, hookspec

__all__ = [
    "BLOCK_VARIABLE",
    "Kind",
    "PluginRow",
    "PluginWarning",
    "Plugins",
    "detect_cluster",
    "hookimpl",
    "hookspec",
    "load_plugins",
    "parse_cluster",
]
