"""Tests of the Python package, as it is installed: `testing/python/run`."""
