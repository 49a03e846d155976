"""`compiled-llm chat`: questions and answers in a terminal or a pipe, by a model of this process or a generator."""
