"""Measures this machine: `calibrate` makes a profile, `diagnose` (the doctor) checks it."""

from dyncp.calibrate.calibration import CalibrateSetting, Calibration, calibrate
from dyncp.calibrate.doctor import Diagnosis, Finding, diagnose
from dyncp.calibrate.environment import World

__all__ = [
    "CalibrateSetting",
    "Calibration",
    "Diagnosis",
    "Finding",
    "World",
    "calibrate",
    "diagnose",
]
