"""OpenAI's responses: items in and out, kept as long as the pool keeps their request."""
