"""Measures the devices at hand and fits a device profile: a cluster description in figures that software reaches here.

``measure`` runs in as many processes as there are devices, ``fit`` finds the figures, ``profile`` writes them.
"""

from paddle_rbt_plugin.calibrate.calibrate import Calibration, calibrate
from paddle_rbt_plugin.calibrate.fit import DeviceFit, LinkFit, fit

__all__ = ["Calibration", "DeviceFit", "LinkFit", "calibrate", "fit"]
