"""What layers keep and how they attend, besides softmax attention to keys and values."""
