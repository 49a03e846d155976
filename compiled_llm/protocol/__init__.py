"""The protocol between an engine process and its clients: MessagePack messages in frames with a length."""
