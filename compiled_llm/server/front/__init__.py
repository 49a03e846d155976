"""The front: OpenAI's API over HTTP. It makes prompts of messages and text of tokens; a generator answers them."""
