"""What endpoints share: errors, events, answers on their way."""
