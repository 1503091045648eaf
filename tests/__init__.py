"""Tests of ds_ldt; the tree mirrors the package."""
