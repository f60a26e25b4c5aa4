"""The paper's scheduler: requests, slots, Select, Algorithm 1. Pure: no clock, no I/O."""
