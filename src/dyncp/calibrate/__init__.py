"""Measures this machine: `calibrate` makes a profile, `diagnose` (the doctor) finds faults."""

from dyncp.calibrate.calibration import Calibration, calibrate
from dyncp.calibrate.diagnosis import Diagnosis, Finding, diagnose
from dyncp.calibrate.timing import Repeats, Tools
from dyncp.calibrate.world import World, open_world, under_torchrun
