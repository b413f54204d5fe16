"""Faults on purpose: processes of a run are killed, stalled, slowed, and their answers corrupted, to see what becomes of it."""
