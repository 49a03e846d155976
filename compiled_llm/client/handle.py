"""What ``Client.submit`` returns, by the name that it had as a class of its own."""

from compiled_llm.requests.handle import RequestHandle as RemoteHandle

__all__ = ["RemoteHandle"]
