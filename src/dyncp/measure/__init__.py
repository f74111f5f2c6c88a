"""Measurements on real devices and ranks, for `dyncp bench`, `calibrate` and `doctor`."""
