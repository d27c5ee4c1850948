"""The web service: checks requests, stores, hints, reads. Knows neither torch nor the worker's code."""
