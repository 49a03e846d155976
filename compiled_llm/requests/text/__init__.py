"""The text of an answer, made of its tokens as they come."""
