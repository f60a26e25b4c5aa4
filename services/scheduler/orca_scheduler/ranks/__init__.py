"""Ranks and pods as the master of their engine reaches them."""
