"""Measurements, one module each, run by `make bench`. They print figures beside a limit; nothing is asserted."""
