"""Anthropic's messages: blocks in and out, by the same prompts and answers as chats."""
