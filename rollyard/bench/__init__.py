"""Measures this machine: engine, trainer and whole steps, beside peers that take turns with them."""
