"""`python -m orca_endpoint`."""

from .app import main

main()
