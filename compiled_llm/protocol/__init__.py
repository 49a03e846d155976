"""What a generator and its clients say to each other: messages in MessagePack, each in a frame with its length."""
