"""One iteration as a model sees it: the flat batch, the rows, keys and values, and the model's interface."""
