"""Compiled code in a folder: written by one process, checked and read by others, which then compile nothing."""

# manifest.json has the requirements, and each file with its size and SHA-256; profile.json the steps to prepare before
# the first request; inductor/ what Inductor and AOTAutograd cache; triton/ Triton's cache and flashinfer/ NAME/NAME.so,
# on CUDA; compiler/ what stands for the C++ compiler, on a CPU.
# Files hold code and pickles. So a folder is read only if no user but this one and root can have written it, and each
# file is compared with the manifest before anything is imported or unpickled. What is read is a copy, in a folder of
# this process alone: what was compared is what runs, several processes can share a folder, and it can be read-only.
# On a CPU, kept/ has what programs of ours do with that code, and hashes of what they were traced from: what Dynamo
# makes of a trace, torch stores for no graph like ours.
