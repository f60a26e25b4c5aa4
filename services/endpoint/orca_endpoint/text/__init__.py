"""Text and tokens: the vocabulary of a model, and the text of a stream of tokens."""
