"""What stands in for Dynamo's guards when a kept program is taken: hashes of all that its trace has read."""
