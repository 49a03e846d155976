"""Images in requests: fetched and bounded in API servers, decoded in a worker process of the engine process."""
