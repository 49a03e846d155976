"""The encoder of Qwen-VL as a program of ours: one for all sizes of images, captured for a few."""
