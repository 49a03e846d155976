"""The version of this package; its metadata has the same, but only where it was installed."""

OWN_VERSION = "0.1.0"
