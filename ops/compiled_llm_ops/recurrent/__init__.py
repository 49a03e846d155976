"""Ops of recurrent layers: each row has a state of fixed size."""

# A step reads it from one entry of a pool, and writes another one. The entry that was read stays as it was: a step that
# has to run again begins there, and so does a row that gives up its last token.
