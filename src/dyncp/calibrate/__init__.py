"""Measures this machine: `calibrate` makes a profile, `diagnose` (the doctor) checks it."""

from dyncp.calibrate.calibration import CalibrateSetting, Calibration, calibrate
from dyncp.calibrate.calls import World
from dyncp.calibrate.diagnosis import Diagnosis, Finding, diagnose
