"""Kept programs of this user's processes: a folder of ours, with all the code that they need.

``programs/KEY/NAME``, of ``COMPILED_LLM_CACHE``, is one program: KEY stands for the model, the machine, versions and
options, and NAME for what the program does and was traced from. It is written under another name, and renamed once it
is whole, so a process that is killed leaves nothing under that name, and any number of processes may write at once. A
program that cannot be read as it was written is removed, and traced again.
"""
