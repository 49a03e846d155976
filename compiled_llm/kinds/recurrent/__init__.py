"""Recurrent layers: what they keep of rows besides pages, and how they compute packed rows."""
