"""`orca doctor`: says what is wrong with an installation on Kubernetes, or would be.

It first gathers what it needs, then judges. Gathering talks to the cluster and changes nothing in it
(`gather.py`; what runs in pods is in `inside/`). The result is a `Snapshot` of plain values. A check is a pure function
of it, so a test writes the snapshot of each fault down. `examine.py` has the list of all checks.
"""
