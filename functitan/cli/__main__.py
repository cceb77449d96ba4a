"""``python -m functitan.cli``: the command line without its script."""

from functitan.cli.main import main

main()
