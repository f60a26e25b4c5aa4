"""The methods that are served over HTTP, in OpenAI's shape."""
