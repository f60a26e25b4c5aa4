"""`POST /v1/completions`: its body, its answers, and the method between them."""
