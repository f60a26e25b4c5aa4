"""`python -m orca_ui`."""

from .app import main

main()
