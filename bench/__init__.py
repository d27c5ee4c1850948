"""Measurements, one module each, run by `make bench`. They print figures beside a limit; nothing is asserted.

`bench.gpu` is a command of its own: it needs a GPU, and holds what it finds against what is promised.
"""
