"""Ops of multi-head latent attention: pages hold what keys and values are expanded from."""
