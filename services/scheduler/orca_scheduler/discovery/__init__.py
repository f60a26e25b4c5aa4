"""Which engines there may be, and where their pods are (docs/engines.md, "Discovery")."""
