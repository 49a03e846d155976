"""What the trial forward of ``wrap`` has found of a model, kept beside programs: the next process need not run it.

A trial forward on fake tensors reads no weights. So what it finds follows from the code that it has run, from what that
reads, and from the sizes of tensors: all of that is hashed, as for a program. What runs on real tensors runs each time.
"""
