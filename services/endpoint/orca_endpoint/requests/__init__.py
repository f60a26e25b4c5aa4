"""A request before the pool has it: bounded, waited for, checked, and made a record of the pool."""
