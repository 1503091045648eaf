"""Measurements over an emulated link; see README.md. They are commands, not tests."""
