"""Other people's tools over our engine; each in a folder of its own, which imports the tool only when it is used."""
