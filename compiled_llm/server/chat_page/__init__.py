"""The page at ``/`` to chat on: our own files, and kept libraries with their licences."""
