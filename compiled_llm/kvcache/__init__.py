"""The page pool: which page belongs to which row, and the memory behind the pages."""
