"""How many requests a server takes, unless it is told otherwise."""

MM_ENCODER_CACHE_GB = 0.25  # for what the encoder makes of images
MAX_QUEUE = 2048  # that wait for an API server to answer; further ones are refused
MAX_UNSENT = 2**16
"""Tokens that wait for a client that does not read: of an engine process's client, or of a request to an API server."""
MAX_CONNECTIONS = 4096  # of clients of an API server, at a time
CLIENT_SECONDS = 30.0
"""In which an API server's client has to send a head, and then a body, and to take something of its answer."""
MAX_BODY_BYTES = 8 * 2**20  # of a request
MAX_BODY_BYTES_WITH_IMAGES = 32 * 2**20  # of one to a model that reads images, which come in it as base64
MOST_BODY_BYTES = 64 * 2**20  # that a server can be told to take; a message to an engine process can have as many
MAX_IMAGES = 16  # images that a request can have
MAX_IMAGE_BYTES = 8 * 2**20  # of an image's file
MAX_IMAGE_PIXELS = 2**25  # of an image; decoded, each takes three bytes
MAX_REQUEST_PIXELS = 2**28  # of all images of a request, which are decoded one after the other
MAX_KEPT_OF_IMAGES = 2**32
"""Bytes that all requests keep of what processors have made of images; meanwhile no further images are decoded."""
MOST_IMAGE_PIXELS = 2**26  # that a server can be told to take; engines decode no more themselves
