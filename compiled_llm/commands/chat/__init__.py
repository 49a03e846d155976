"""`compiled-llm chat`: questions and answers in a terminal or a pipe, by a model in this process or in another."""
