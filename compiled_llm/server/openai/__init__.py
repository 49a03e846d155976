"""OpenAI's API, a folder for each endpoint that has more than one file."""
