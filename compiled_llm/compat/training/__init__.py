"""Private parts of libraries that train."""
