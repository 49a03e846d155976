"""The page pool: which page belongs to which row, and the memory of the pages."""
