"""The data plane carries tensors between the ranks of an engine; tensors take no other way."""
