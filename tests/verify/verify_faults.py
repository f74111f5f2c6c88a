"""A catalogue of faults: small functions that break one thing in a healthy plan."""

import verify_faults_messages
import verify_faults_numbers
import verify_faults_results
import verify_faults_slots
import verify_faults_tiles
from verify_edits import NAME, Fault, faults_of

FAULTS = [
    fault
    for module in (
        verify_faults_tiles,
        verify_faults_slots,
        verify_faults_messages,
        verify_faults_results,
        verify_faults_numbers,
    )
    for fault in faults_of(module)
]

__all__ = ["FAULTS", "NAME", "Fault"]
