"""Tests of the transport with real processes."""
