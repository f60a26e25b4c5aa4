"""The ways in which the weights of linear operations are kept: one file each, one line each in `table.py`."""
