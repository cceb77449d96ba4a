"""The command line; see :mod:`functitan.cli.main`."""
