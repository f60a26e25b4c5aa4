"""Ollama's API: chats and prompts in, lines of JSON out, by the same prompts and answers as OpenAI's chats."""
