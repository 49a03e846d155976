"""Programs that are taken as they were kept, without a trace.

A traced program is a list of inputs, each of which lies on a path from the program's own arguments, a list of calls of
compiled functions, and a list of outputs. ``record`` writes that down in a process that traces; ``take`` makes the
program of it in one that does not. What Dynamo's guards say is in ``fingerprint``, what they say of the arguments of
one call in ``layout``.
"""
