"""Kernels for CPUs, in C++: a stage of a model as one program, run by threads of its own."""
