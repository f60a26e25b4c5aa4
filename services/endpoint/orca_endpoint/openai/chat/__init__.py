"""OpenAI's chat: messages in, by the model's chat template; an assistant's message out, whole or streamed."""
